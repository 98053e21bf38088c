// Making elements. Text stays text: nothing in this page reads HTML, and the policy forbids it.

const SVG = 'http://www.w3.org/2000/svg';

/**
 * Makes an element. `on…` attributes are listeners, `true` is a bare attribute; null and false are left
 * out. Children are nodes, strings, or null for nothing.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** One of the drawings at the top of index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('class', 'icon');
  svg.setAttribute('aria-hidden', 'true');
  const use = document.createElementNS(SVG, 'use');
  use.setAttribute('href', `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button with a drawing; `label` is what it is called, and what is seen while the pointer rests on it. */
export function iconButton(name, label, onclick, attributes = {}) {
  return h(
    'button',
    { type: 'button', class: 'icon-button', 'aria-label': label, title: label, onclick, ...attributes },
    icon(name),
  );
}

/** A button with words. */
export function button(label, onclick, attributes = {}) {
  return h('button', { type: 'button', class: 'button', onclick, ...attributes }, label);
}

/** Puts text on the clipboard; true if that worked. Pages without TLS have only the old way. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h('textarea', { class: 'unseen', 'aria-hidden': 'true' });
    area.value = text;
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const copied = document.execCommand('copy');
    area.remove();
    focused?.focus();
    return copied;
  }
}

/** A button that copies and says so. */
export function copyButton(label, text) {
  const made = iconButton('copy', label, async () => {
    const copied = await copyText(text());
    made.replaceChildren(icon(copied ? 'check' : 'close'));
    say(copied ? 'Copied' : 'The browser refused to copy');
    setTimeout(() => made.replaceChildren(icon('copy')), 1500);
  });
  return made;
}

/** Tells something to a screen reader. */
export function say(text) {
  document.getElementById('spoken').textContent = text;
}

/** A short message at the edge, with one thing to do about it. */
export function toast(text, label = null, run = null) {
  const box = document.getElementById('toasts');
  const made = h('div', { class: 'toast' }, h('span', {}, text));
  const close = () => made.remove();
  if (label) {
    made.append(
      button(
        label,
        () => {
          close();
          run();
        },
        { class: 'button plain' },
      ),
    );
  }
  made.append(iconButton('close', 'Close', close));
  box.replaceChildren(made);
  setTimeout(close, 9000);
}

/** An id that no other thing of this page has. */
export function freshId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
