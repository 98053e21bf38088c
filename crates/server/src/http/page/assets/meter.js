// The line of live numbers: the server's state, speed, drafts, cache, context and slots.

import { get } from './api.js';
import { h } from './dom.js';

const BUSY_MS = 400;
const CALM_MS = 3000;

/** `requestId()` is the page's own running request, or null. */
export class Meter {
  #requestId;
  #last = null;
  #timer = null;
  #parts = {
    state: h('span', { class: 'state', 'data-state': 'wait' }, 'connecting'),
    speed: h('span', { title: 'Tokens a second' }),
    drafts: h('span', { title: 'Drafted tokens of the last reply that were right' }),
    cache: h('span', { title: 'Prompt tokens of the last request that came from the cache' }),
    context: h('span', { class: 'context', title: 'Tokens of this conversation, and how many fit' }),
    slots: h('span', { class: 'slots', role: 'img', 'aria-label': 'Slots' }),
  };

  constructor(requestId) {
    this.#requestId = requestId;
    this.element = h(
      'div',
      { class: 'meter', id: 'meter', 'aria-label': 'Server', role: 'group' },
      ...Object.values(this.#parts),
    );
    document.addEventListener('visibilitychange', () => this.poll());
  }

  /** The state of the server in a word: `ready`, `loading …`, `away`. */
  setState(kind, text) {
    this.#parts.state.dataset.state = kind;
    this.#parts.state.textContent = text;
  }

  /** Shows the numbers of a reply that is over. */
  reply(stats, context) {
    if (!stats) return;
    const { perSecond, proposed, accepted, cachedTokens, promptTokens, tokens } = stats;
    if (perSecond !== null) this.#parts.speed.textContent = `${perSecond.toFixed(1)} tok/s`;
    this.#parts.drafts.textContent =
      proposed > 0 ? `drafts ${Math.round((100 * accepted) / proposed)} %` : '';
    this.#parts.cache.textContent = `cached ${cachedTokens} of ${promptTokens}`;
    this.#context(promptTokens + tokens, context);
  }

  /** Forgets the last reply: another chat is shown. */
  clear() {
    for (const name of ['speed', 'drafts', 'cache', 'context']) this.#parts[name].replaceChildren();
  }

  #context(used, all) {
    const bar = h('progress', { max: all, value: used, 'aria-label': 'Context in use' });
    this.#parts.context.replaceChildren(bar, `${used.toLocaleString('en')} of ${all.toLocaleString('en')}`);
  }

  /** Asks for the slots now, and again and again while the page is seen. */
  async poll() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    const running = this.#requestId();
    try {
      this.#slots(await get('/slots'), running);
    } catch {
      // Whoever needs the server finds out; `main.js` watches its state.
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.poll(), this.#requestId() ? BUSY_MS : CALM_MS);
  }

  #slots(slots, running) {
    const busy = slots.filter(({ state }) => state !== 'idle').length;
    this.#parts.slots.replaceChildren(...slots.map(({ state }) => h('i', { 'data-state': state })));
    const label = `${busy} of ${slots.length} slots busy`;
    this.#parts.slots.title = label;
    this.#parts.slots.setAttribute('aria-label', label);
    const own = running && slots.find(({ request_id: id }) => id === running);
    if (!own) {
      this.#last = null;
      return;
    }
    this.#context(own.n_prompt + own.n_decoded, own.n_ctx);
    const now = performance.now();
    if (this.#last?.id === running && own.n_decoded > this.#last.tokens) {
      const speed = ((own.n_decoded - this.#last.tokens) * 1000) / (now - this.#last.at);
      this.#parts.speed.textContent = `${speed.toFixed(1)} tok/s`;
    }
    this.#last = { id: running, tokens: own.n_decoded, at: now };
  }
}
