// The place where a message is written.

import { h, icon, iconButton, say, toast } from './dom.js';
import { filesOf, readPictures } from './pictures.js';

const TALLEST = 260;

/** `on.send(text, pictures)`, `on.stop()`, `on.editLast()`; `canSee()` tells whether pictures can be sent. */
export class Composer {
  #on;
  #canSee;
  #pictures = [];
  #busy = false;
  #area = h('textarea', {
    id: 'prompt',
    rows: 1,
    placeholder: 'Write a message',
    'aria-label': 'Message',
    'aria-describedby': 'prompt-help',
    autocomplete: 'off',
  });
  #strip = h('div', { class: 'strip', hidden: true });
  #file = h('input', {
    type: 'file',
    'aria-label': 'Pictures',
    accept: 'image/png,image/jpeg,image/webp,image/gif',
    multiple: true,
    hidden: true,
  });
  #add = iconButton('picture', 'Add pictures', () => this.#file.click(), { id: 'add-picture', hidden: true });
  #go = h('button', { type: 'submit', class: 'go', id: 'go' });

  constructor(on, canSee) {
    this.#on = on;
    this.#canSee = canSee;
    this.element = h(
      'form',
      { class: 'composer', id: 'composer', 'aria-label': 'New message' },
      this.#strip,
      this.#area,
      h(
        'div',
        { class: 'composer-row' },
        this.#add,
        this.#file,
        h('span', { class: 'hint', id: 'prompt-help' }, 'Enter sends, Shift+Enter makes a new line'),
        this.#go,
      ),
    );
    this.element.addEventListener('submit', (event) => {
      event.preventDefault();
      if (this.#busy) this.#on.stop();
      else this.#send();
    });
    this.#area.addEventListener('input', () => this.#fit());
    this.#area.addEventListener('keydown', (event) => this.#key(event));
    this.#area.addEventListener('paste', (event) => this.#offered(event, event.clipboardData));
    this.#file.addEventListener('change', () => this.#take([...this.#file.files]));
    this.setBusy(false);
  }

  /** Takes pictures dropped anywhere on `place`. */
  takeDrops(place) {
    place.addEventListener('dragover', (event) => {
      if (!event.dataTransfer.types.includes('Files')) return;
      event.preventDefault();
      this.element.classList.add('drop');
    });
    for (const name of ['dragleave', 'drop']) {
      place.addEventListener(name, () => this.element.classList.remove('drop'));
    }
    place.addEventListener('drop', (event) => this.#offered(event, event.dataTransfer));
  }

  /** Shows what the server can do. */
  refresh() {
    this.#add.hidden = !this.#canSee();
  }

  /** The button stops while a reply runs. */
  setBusy(busy) {
    this.#busy = busy;
    this.#go.replaceChildren(icon(busy ? 'stop' : 'send'));
    const label = busy ? 'Stop the reply (Esc)' : 'Send (Enter)';
    this.#go.setAttribute('aria-label', label);
    this.#go.title = label;
    this.#go.classList.toggle('stop', busy);
  }

  focus() {
    this.#area.focus();
  }

  /** Puts a text here to be changed or sent. */
  write(text) {
    this.#area.value = text;
    this.#fit();
    this.focus();
  }

  #fit() {
    this.#area.style.height = 'auto';
    this.#area.style.height = `${Math.min(this.#area.scrollHeight, TALLEST)}px`;
  }

  #key(event) {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.#busy) this.#send();
    } else if (event.key === 'ArrowUp' && this.#area.value === '' && !this.#busy) {
      event.preventDefault();
      this.#on.editLast();
    }
  }

  #send() {
    const text = this.#area.value.trim();
    if (text === '' && this.#pictures.length === 0) return;
    const pictures = this.#pictures;
    this.#pictures = [];
    this.#showStrip();
    this.write('');
    this.#on.send(text, pictures);
  }

  #offered(event, transfer) {
    const files = filesOf(transfer);
    if (files.length === 0) return;
    event.preventDefault();
    this.#take(files);
  }

  async #take(files) {
    const { urls, problem } = await readPictures(files, this.#pictures.length, this.#canSee());
    this.#file.value = '';
    if (problem) toast(problem);
    if (urls.length === 0) return;
    this.#pictures.push(...urls);
    this.#showStrip();
    say(`${this.#pictures.length} pictures in this message`);
    this.focus();
  }

  #showStrip() {
    this.#strip.hidden = this.#pictures.length === 0;
    this.#strip.replaceChildren(
      ...this.#pictures.map((url, at) =>
        h(
          'div',
          { class: 'thumb' },
          h('img', { src: url, alt: `Picture ${at + 1}` }),
          iconButton('close', `Remove picture ${at + 1}`, () => {
            this.#pictures.splice(at, 1);
            this.#showStrip();
            this.focus();
          }),
        ),
      ),
    );
  }
}
