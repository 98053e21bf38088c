// Calls of tools: what the model wants done, and the place where you write what came of it.

import { button, h, icon } from './dom.js';
import { codeBlock } from './render.js';

function pretty(args) {
  try {
    return JSON.stringify(JSON.parse(args), null, 2);
  } catch {
    return args;
  }
}

function card({ name, args }) {
  return h(
    'div',
    { class: 'call' },
    h('div', { class: 'call-head' }, icon('tool'), h('span', {}, 'Calls '), h('strong', {}, name)),
    codeBlock({ language: 'arguments', text: pretty(args) }),
  );
}

/** A card for each call; with `answer`, a place for each result, and one button that sends them all. */
export function callCards(calls, answer) {
  const whole = calls.filter(Boolean);
  const cards = whole.map(card);
  if (!answer || whole.length === 0) return cards;
  const areas = whole.map(({ name }, at) => {
    const area = h('textarea', {
      rows: 2,
      placeholder: 'What the tool answers',
      'aria-label': `Result of ${name}`,
    });
    cards[at].append(area);
    return area;
  });
  const send = () => answer(whole.map(({ id, name }, at) => ({ callId: id, name, text: areas[at].value })));
  const label = whole.length > 1 ? 'Send the results' : 'Send the result';
  return [...cards, h('div', { class: 'row' }, button(label, send, { class: 'button strong' }))];
}
