// The chats that this browser keeps.

import { h, icon, iconButton } from './dom.js';

const DAY = 86_400_000;

function group(updated, now) {
  const today = new Date(now).setHours(0, 0, 0, 0);
  if (updated >= today) return 'Today';
  if (updated >= today - DAY) return 'Yesterday';
  return updated >= today - 7 * DAY ? 'Last days' : 'Earlier';
}

/** `on.open(chat)`, `on.fresh()`, `on.remove(chat)`. */
export class Sidebar {
  #list = h('nav', { class: 'chats', 'aria-label': 'Kept chats' });
  #on;
  #shown = '';

  constructor(place, on) {
    this.#on = on;
    place.append(
      h(
        'div',
        { class: 'brand' },
        h('img', { src: '/ui/icon.svg', alt: '', width: 26, height: 26 }),
        h('span', {}, 'Clary'),
      ),
      h(
        'button',
        { type: 'button', class: 'fresh', id: 'fresh', onclick: () => on.fresh() },
        icon('plus'),
        h('span', {}, 'New chat'),
        h('kbd', {}, 'Alt N'),
      ),
      this.#list,
      h('p', { class: 'side-foot' }, 'Chats stay in this browser.'),
    );
  }

  /** Shows chats, newest first. Nothing is touched if nothing changed: a row may have the focus. */
  show(chats, currentId) {
    const wanted = JSON.stringify([currentId, chats.map(({ id, title }) => [id, title])]);
    if (wanted === this.#shown) return;
    this.#shown = wanted;
    const children = [];
    let last = null;
    for (const chat of chats) {
      const name = group(chat.updated, Date.now());
      if (name !== last) children.push(h('h2', {}, name));
      last = name;
      children.push(this.#row(chat, chat.id === currentId));
    }
    if (chats.length === 0) children.push(h('p', { class: 'none' }, 'No chats yet.'));
    this.#list.replaceChildren(...children);
  }

  #row(chat, current) {
    const title = chat.title || 'Empty chat';
    return h(
      'div',
      { class: current ? 'chat current' : 'chat' },
      h(
        'button',
        {
          type: 'button',
          class: 'chat-open',
          'aria-current': current ? 'true' : null,
          title,
          onclick: () => this.#on.open(chat),
        },
        title,
      ),
      iconButton('trash', `Delete the chat “${title}”`, () => this.#on.remove(chat)),
    );
  }
}
