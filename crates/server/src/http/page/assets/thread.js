// The list of messages: one view for each, kept at its end while a reply grows.

import { isRunning } from './chat.js';
import { button, h, icon, iconButton } from './dom.js';
import { messageView } from './message.js';

/** Pixels from the end within which the reader counts as being there. */
const NEAR = 80;

/** `on` has what the buttons of messages do; `hints` are things to begin with. */
export class Thread {
  #place;
  #on;
  #list = h('div', { class: 'messages' });
  #views = new Map();
  #pending = new Set();
  #follows = true;
  #toEnd = iconButton('down', 'Go to the end', () => this.toEnd(), {
    class: 'icon-button to-end',
    hidden: true,
  });

  constructor(place, on) {
    this.#place = place;
    this.#on = on;
    place.append(this.#list, h('div', { class: 'to-end-place' }, this.#toEnd));
    new ResizeObserver(() => this.#follows && this.toEnd()).observe(place);
    place.addEventListener(
      'scroll',
      () => {
        this.#follows = place.scrollHeight - place.scrollTop - place.clientHeight < NEAR;
        this.#toEnd.hidden = this.#follows;
      },
      { passive: true },
    );
  }

  /** Shows these messages; views of those that are still there stay. */
  show(messages, welcome) {
    const views = messages.map((message) => this.#views.get(message.id) ?? messageView(message, this.#on));
    this.#views = new Map(messages.map((message, at) => [message.id, views[at]]));
    this.#list.replaceChildren(...(messages.length > 0 ? views.map(({ element }) => element) : [welcome()]));
    for (const view of views) view.update();
    this.toEnd();
  }

  /** Shows what is new of a message, at the next frame. */
  update(message) {
    if (this.#pending.size === 0) requestAnimationFrame(() => this.#paint());
    this.#pending.add(message.id);
    if (!isRunning(message)) this.#paint();
  }

  #paint() {
    for (const id of this.#pending) this.#views.get(id)?.update();
    this.#pending.clear();
    if (this.#follows) this.#place.scrollTop = this.#place.scrollHeight;
  }

  /** Goes to the end and stays there. */
  toEnd() {
    this.#follows = true;
    this.#toEnd.hidden = true;
    this.#place.scrollTop = this.#place.scrollHeight;
  }

  /** Opens the editor of a message. */
  edit(id) {
    this.#views.get(id)?.edit?.();
  }
}

/** What an empty chat shows. */
export function welcome(model, canSee, ask) {
  const hints = [
    'What is 37 + 58?',
    'Write a haiku about rivers.',
    'Explain recursion with an example in Python.',
  ];
  const hint = (text) => button(text, () => ask(text), { class: 'button hint-button' });
  return h(
    'div',
    { class: 'welcome' },
    icon('leaf'),
    h('h1', {}, model ?? 'Clary'),
    h(
      'p',
      {},
      'Ask something to begin. ',
      canSee ? 'Pictures can be dropped or pasted. ' : '',
      'Chats are kept in this browser only.',
    ),
    h('div', { class: 'hints' }, hints.map(hint)),
  );
}
