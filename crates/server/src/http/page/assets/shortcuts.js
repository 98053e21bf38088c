// Keys of the whole page. Letters go by their place on the keyboard: on some, Alt makes other signs of them.

import { isOpen } from './dialogs.js';

function isTyping(target) {
  return target.matches('input, textarea, select') || target.isContentEditable;
}

/** Shortcuts as {keys, label, fits(event), run()}; those without `fits` are told and handled elsewhere. */
export function shortcuts(run) {
  const alt = (letter) => (event) =>
    event.altKey && !event.ctrlKey && !event.metaKey && event.code === `Key${letter}`;
  const plain = (key) => (event) =>
    event.key === key && !event.altKey && !event.ctrlKey && !event.metaKey && !isTyping(event.target);
  return [
    { keys: 'Enter', label: 'Send the message' },
    { keys: 'Shift Enter', label: 'New line' },
    { keys: 'Esc', label: 'Stop the reply', fits: (event) => event.key === 'Escape', run: run.stop },
    { keys: '↑', label: 'Edit your last message, from an empty message box' },
    { keys: '/', label: 'Go to the message box', fits: plain('/'), run: run.focus },
    { keys: 'Alt R', label: 'Make the last reply again', fits: alt('R'), run: run.retry },
    { keys: 'Alt E', label: 'Edit your last message', fits: alt('E'), run: run.editLast },
    { keys: 'Alt C', label: 'Copy the last reply', fits: alt('C'), run: run.copy },
    { keys: 'Alt N', label: 'New chat', fits: alt('N'), run: run.fresh },
    { keys: 'Alt B', label: 'Show or hide the chats', fits: alt('B'), run: run.side },
    { keys: 'Alt S', label: 'Settings', fits: alt('S'), run: run.settings },
    { keys: 'Alt T', label: 'Theme', fits: alt('T'), run: run.theme },
    { keys: '?', label: 'This list', fits: plain('?'), run: run.help },
  ];
}

/** Listens for them while nothing is open over the page. */
export function listen(list) {
  document.addEventListener('keydown', (event) => {
    if (isOpen() || event.defaultPrevented || event.isComposing) return;
    const found = list.find(({ fits }) => fits?.(event));
    if (!found) return;
    event.preventDefault();
    found.run();
  });
}
