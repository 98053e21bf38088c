// How one message looks.

import { isRunning } from './chat.js';
import { button, copyButton, h, icon, iconButton } from './dom.js';
import { Markdown } from './render.js';
import { callCards } from './tools.js';
import { WAYS, explain } from './words.js';

/** A view of a message: `element`, and `update()` after the message changed. `on` has what its buttons do. */
export function messageView(message, on) {
  switch (message.role) {
    case 'user':
      return userView(message, on);
    case 'tool':
      return toolView(message);
    default:
      return new ReplyView(message, on);
  }
}

function userView(message, on) {
  const pictures = (message.pictures ?? []).map((url) =>
    h('img', { src: url, alt: 'A picture of this message' }),
  );
  const bubble = h(
    'div',
    { class: 'bubble' },
    pictures.length > 0 ? h('div', { class: 'pictures' }, pictures) : null,
    message.text ? h('p', {}, message.text) : null,
  );
  const element = h(
    'article',
    { class: 'message user', 'aria-label': 'You', 'data-id': message.id },
    bubble,
    h(
      'div',
      { class: 'actions' },
      iconButton('edit', 'Edit this message', () => edit()),
      copyButton('Copy this message', () => message.text),
    ),
  );
  const edit = () => {
    const form = editor(message, (text) => {
      if (text === null) close();
      else on.edit(message.id, text);
    });
    const close = () => {
      form.replaceWith(bubble);
      element.classList.remove('editing');
      element.querySelector('.actions .icon-button').focus();
    };
    bubble.replaceWith(form);
    element.classList.add('editing');
    const area = form.querySelector('textarea');
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  };
  return { element, update() {}, edit };
}

/** Calls `done` with the new text, or with null. */
function editor(message, done) {
  const area = h('textarea', {
    rows: Math.min(12, message.text.split('\n').length + 1),
    'aria-label': 'Edit message',
  });
  area.value = message.text;
  const send = () => {
    if (area.value.trim()) done(area.value.trim());
  };
  area.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') {
      event.stopPropagation();
      done(null);
    } else if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  return h(
    'div',
    { class: 'editor' },
    area,
    h(
      'div',
      { class: 'row' },
      h('span', { class: 'hint' }, 'What follows this message is made anew.'),
      button('Cancel', () => done(null)),
      button('Send', send, { class: 'button strong' }),
    ),
  );
}

function toolView(message) {
  const element = h(
    'article',
    { class: 'message result', 'aria-label': `Result of ${message.name}` },
    h('div', { class: 'call-head' }, icon('tool'), h('span', {}, `Result of ${message.name}`)),
    h('pre', { tabindex: '0' }, message.text),
  );
  return { element, update() {} };
}

/** A reply: reasoning, text, calls, what went wrong, numbers. */
class ReplyView {
  #message;
  #on;
  #answer = new Markdown();
  #reasoning = new Markdown();
  #parts;
  #calls = '';

  constructor(message, on) {
    this.#message = message;
    this.#on = on;
    const summary = h('summary', {}, h('span', { class: 'summary' }));
    this.#parts = {
      waiting: h(
        'div',
        { class: 'waiting', role: 'status', 'aria-label': 'Waiting for the reply' },
        h('i'),
        h('i'),
        h('i'),
      ),
      reasoning: h('details', { class: 'reasoning' }, summary, this.#reasoning.element),
      summary: summary.firstChild,
      calls: h('div', { class: 'calls' }),
      failure: h('div', { class: 'failure-place' }),
      foot: h('div', { class: 'reply-foot' }),
    };
    const { waiting, reasoning, calls, failure, foot } = this.#parts;
    this.element = h(
      'article',
      { class: 'message reply', 'aria-label': 'Reply', 'data-id': message.id },
      waiting,
      reasoning,
      this.#answer.element,
      calls,
      failure,
      foot,
    );
    this.update();
  }

  update() {
    const { state, reasoning, text } = this.#message;
    const { waiting, reasoning: details, summary } = this.#parts;
    const running = isRunning(this.#message);
    this.element.classList.toggle('running', running);
    this.element.setAttribute('aria-busy', String(running));
    waiting.hidden = state !== 'waiting' || text !== '';
    details.hidden = reasoning === '';
    details.classList.toggle('live', state === 'reasoning');
    summary.textContent = this.#summary();
    this.#reasoning.update(reasoning.trim());
    this.#answer.element.hidden = text === '';
    this.#answer.update(text);
    this.#showCalls();
    this.#showFailure();
    if (running) this.#parts.foot.replaceChildren();
    else this.#showFoot();
  }

  #summary() {
    const { state, reasoningMs, stats } = this.#message;
    if (state === 'reasoning') return 'Thinking…';
    const tokens = stats?.reasoningTokens ? `, ${stats.reasoningTokens} tokens` : '';
    return reasoningMs === null ? 'Thoughts' : `Thought for ${(reasoningMs / 1000).toFixed(1)} s${tokens}`;
  }

  /** Cards are made anew only when a call changed: one of them may hold a half-typed result. */
  #showCalls() {
    const { calls } = this.#message;
    const open = !isRunning(this.#message) && this.#on.isLast(this.#message);
    const shown = JSON.stringify([calls, open]);
    if (shown === this.#calls) return;
    this.#calls = shown;
    this.#parts.calls.replaceChildren(...callCards(calls, open ? this.#on.answer : null));
  }

  #showFailure() {
    const { failure, id } = this.#message;
    if (!failure) {
      this.#parts.failure.replaceChildren();
      return;
    }
    const { title, text, detail, ways } = explain(failure);
    const isSaid = detail.toLowerCase() === title.toLowerCase();
    const buttons = ways.map((way, at) =>
      button(WAYS[way], () => this.#on.way(way, id), { class: at === 0 ? 'button strong' : 'button' }),
    );
    this.#parts.failure.replaceChildren(
      h(
        'div',
        { class: 'failure', role: 'alert' },
        h('strong', {}, title),
        h('p', {}, text),
        isSaid ? null : h('p', { class: 'detail' }, detail),
        h('div', { class: 'row' }, buttons),
      ),
    );
  }

  #showFoot() {
    const { id, state, finish, text, failure } = this.#message;
    const cut = (finish === 'length' || state === 'stopped') && text !== '';
    this.#parts.foot.replaceChildren(
      h(
        'div',
        { class: 'actions' },
        text ? copyButton('Copy this reply', () => text) : null,
        failure ? null : iconButton('retry', 'Make this reply again', () => this.#on.retry(id)),
        cut && this.#on.isLast(this.#message)
          ? h(
              'button',
              { type: 'button', class: 'button plain', onclick: () => this.#on.continue(id) },
              icon('forward'),
              'Go on',
            )
          : null,
      ),
      numbers(this.#message),
    );
  }
}

/** The line of numbers under a reply. */
function numbers({ stats, state, finish }) {
  const facts = [];
  if (state === 'stopped') facts.push(['stopped', 'You stopped this reply']);
  if (finish === 'length') facts.push(['cut at the limit', 'The reply reached its longest length']);
  if (stats) {
    facts.push([`${stats.tokens} tokens`, `${stats.reasoningTokens} of them reasoning`]);
    if (stats.perSecond !== null) facts.push([`${stats.perSecond.toFixed(1)} tok/s`, 'Speed of writing']);
    if (stats.firstMs !== null)
      facts.push([`first after ${(stats.firstMs / 1000).toFixed(2)} s`, 'Queue and prompt']);
    if (stats.proposed > 0) {
      const share = Math.round((100 * stats.accepted) / stats.proposed);
      facts.push([`drafts ${share} %`, `${stats.accepted} of ${stats.proposed} drafted tokens were right`]);
    }
    facts.push([`cached ${stats.cachedTokens} of ${stats.promptTokens}`, 'Prompt tokens from the cache']);
    if (stats.seed !== null) facts.push([`seed ${stats.seed}`, 'The seed of this reply']);
    for (const note of stats.notes) facts.push([`note: ${note}`, 'What the server did on your behalf']);
  }
  return h(
    'div',
    { class: 'numbers' },
    facts.map(([text, title]) => h('span', { title }, text)),
  );
}
