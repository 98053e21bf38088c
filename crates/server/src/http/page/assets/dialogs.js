// What opens over the page: settings, key, shortcuts.

import { button, h } from './dom.js';
import { settingsForm } from './form.js';

/** Shows an element over the page until it is closed; the focus goes back to where it was. */
function over(element, label, closed = () => {}) {
  const dialog = h('dialog', { 'aria-label': label }, element);
  const focused = document.activeElement;
  dialog.addEventListener('close', () => {
    dialog.remove();
    focused?.focus();
    closed();
  });
  dialog.addEventListener('click', (event) => {
    if (event.target === dialog) dialog.close();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** Whether something is open. */
export function isOpen() {
  return document.querySelector('dialog[open]') !== null;
}

/** The settings; `save(typed)` is called if they are to be kept. */
export function openSettings(typed, defaults, save, at = null) {
  const form = settingsForm(typed, defaults, at, (values) => {
    dialog.close();
    if (values) save(values);
  });
  const dialog = over(form.element, 'Settings');
  form.first();
}

/** Asks for a key; `use(key, remember)` gets it. */
export function openKey(hint, use) {
  const input = h('input', {
    type: 'password',
    id: 'key-input',
    autocomplete: 'off',
    required: true,
    'aria-describedby': 'key-hint',
  });
  const remember = h('input', { type: 'checkbox', id: 'key-remember' });
  const form = h(
    'form',
    { class: 'sheet narrow' },
    h('h2', {}, 'This server wants a key'),
    h('p', { class: 'hint', id: 'key-hint' }, hint),
    h('div', { class: 'field' }, h('label', { for: 'key-input' }, 'Key'), input),
    h('label', { class: 'check' }, remember, 'Remember it in this browser'),
    h(
      'div',
      { class: 'row' },
      h('span', { class: 'spring' }),
      button('Cancel', () => dialog.close()),
      h('button', { class: 'button strong', id: 'use-key' }, 'Use this key'),
    ),
  );
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    const value = input.value.trim();
    if (value === '') return;
    dialog.close();
    use(value, remember.checked);
  });
  const dialog = over(form, 'Key');
  input.focus();
}

/** The list of shortcuts. */
export function openHelp(shortcuts) {
  const line = ({ keys, label }) => [
    h(
      'dt',
      {},
      keys.split(' ').map((key) => h('kbd', {}, key)),
    ),
    h('dd', {}, label),
  ];
  const close = button('Close', () => dialog.close(), { class: 'button strong' });
  const dialog = over(
    h(
      'div',
      { class: 'sheet narrow' },
      h('h2', {}, 'Keyboard'),
      h('dl', { class: 'keys' }, shortcuts.flatMap(line)),
      h('div', { class: 'row' }, h('span', { class: 'spring' }), close),
    ),
    'Keyboard',
  );
  close.focus();
}
