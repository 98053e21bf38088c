// The Markdown tree as elements. What changes while a reply streams is its last block; the others stay.

import { blocks } from './blocks.js';
import { copyButton, h } from './dom.js';

/** An element that shows a text as Markdown and can be given a longer one. */
export class Markdown {
  #shown = [];

  constructor() {
    this.element = h('div', { class: 'prose' });
  }

  /** Shows a text. */
  update(text) {
    const wanted = blocks(text);
    const same = this.#shown.findIndex(({ raw }, at) => wanted[at]?.raw !== raw);
    const keep = same < 0 ? this.#shown.length : same;
    for (const { element } of this.#shown.splice(keep)) element.remove();
    for (const block of wanted.slice(keep)) {
      const element = elementOf(block);
      this.#shown.push({ raw: block.raw, element });
      this.element.append(element);
    }
  }
}

function elementOf(block) {
  switch (block.kind) {
    // The page's own headings are levels 1 and 2.
    case 'heading':
      return h(`h${Math.min(block.level + 2, 6)}`, { class: `h${block.level}` }, nodes(block.inline));
    case 'code':
      return codeBlock(block);
    case 'quote':
      return h('blockquote', {}, block.blocks.map(elementOf));
    case 'list':
      return listOf(block);
    case 'table':
      return tableOf(block);
    case 'rule':
      return h('hr');
    default:
      return h('p', {}, nodes(block.inline));
  }
}

/** A block of code with its language and a button that copies it. */
export function codeBlock({ language, text }) {
  return h(
    'div',
    { class: 'code' },
    h(
      'div',
      { class: 'code-head' },
      h('span', {}, language || 'code'),
      copyButton('Copy code', () => text),
    ),
    h(
      'pre',
      { tabindex: '0', 'aria-label': `Code${language ? ` in ${language}` : ''}` },
      h('code', {}, text),
    ),
  );
}

function listOf({ ordered, start, tight, items }) {
  const item = ({ checked, blocks: inner }) => {
    const children = inner.flatMap((block) =>
      tight && block.kind === 'paragraph' ? nodes(block.inline) : [elementOf(block)],
    );
    if (checked === null) return h('li', {}, children);
    const box = h('input', {
      type: 'checkbox',
      checked,
      disabled: true,
      'aria-label': checked ? 'done' : 'open',
    });
    return h('li', { class: 'task' }, box, children);
  };
  const first = ordered && start !== 1 ? start : null;
  return h(ordered ? 'ol' : 'ul', { start: first }, items.map(item));
}

function tableOf({ align, head, rows }) {
  const cell = (tag) => (content, column) => h(tag, { class: `to-${align[column]}` }, nodes(content));
  return h(
    'div',
    { class: 'table', tabindex: '0' },
    h(
      'table',
      {},
      h('thead', {}, h('tr', {}, head.map(cell('th')))),
      h(
        'tbody',
        {},
        rows.map((row) => h('tr', {}, row.map(cell('td')))),
      ),
    ),
  );
}

function nodes(tree) {
  return tree.map(({ kind, text, href, children }) => {
    switch (kind) {
      case 'text':
        return text;
      case 'break':
        return h('br');
      case 'code':
        return h('code', {}, text);
      case 'link':
        return h('a', { href, target: '_blank', rel: 'noopener noreferrer' }, nodes(children));
      default:
        return h(kind, {}, nodes(children));
    }
  });
}
