// Markdown inside a block: text to a tree of {kind, text | children, href}. Works in time linear in the text,
// but for brackets, whose reach is bounded.

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SPECIAL = /[\\`*_~[\]!<\nhH]/;
const LABEL_MAX = 1000;
const TARGET_MAX = 2000;
const DEPTH_MAX = 6;

/** An address that may become a link; null for anything a browser might run or that has no host. */
export function safeHref(text) {
  if (!/^(https?:\/\/|mailto:)/i.test(text)) return null;
  try {
    const url = new URL(text);
    return ['http:', 'https:', 'mailto:'].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** The tree of a text. */
export function inline(text, depth = 0) {
  const scan = { text, at: 0, nodes: [], runs: [], plain: '', ticks: new Map(), depth };
  while (scan.at < text.length) step(scan);
  flush(scan);
  emphasize(scan);
  return tidy(scan.nodes);
}

function flush(scan) {
  if (scan.plain !== '') scan.nodes.push({ kind: 'text', text: scan.plain });
  scan.plain = '';
}

function push(scan, node, length) {
  flush(scan);
  scan.nodes.push(node);
  scan.at += length;
}

function take(scan, length = 1) {
  scan.plain += scan.text.slice(scan.at, scan.at + length);
  scan.at += length;
}

function step(scan) {
  const { text, at } = scan;
  const next = text.slice(at).search(SPECIAL);
  if (next !== 0) {
    take(scan, next < 0 ? text.length - at : next);
    return;
  }
  switch (text[at]) {
    case '\\':
      return escape(scan);
    case '`':
      return code(scan);
    case '*':
    case '_':
    case '~':
      return run(scan);
    case '[':
      return link(scan, at);
    case '!':
      return text[at + 1] === '[' ? link(scan, at + 1) : take(scan);
    case '<':
      return angle(scan);
    case '\n':
      return lineBreak(scan);
    case 'h':
    case 'H':
      return address(scan);
    default:
      return take(scan);
  }
}

function escape(scan) {
  const next = scan.text[scan.at + 1];
  if (next === '\n') return push(scan, { kind: 'break' }, 2);
  if (next === undefined || !PUNCTUATION.test(next)) return take(scan);
  scan.plain += next;
  scan.at += 2;
}

function lineBreak(scan) {
  scan.plain = scan.plain.trimEnd();
  push(scan, { kind: 'break' }, 1);
}

/** The length of the run of one character at a place. */
function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function code(scan) {
  const { text, at, ticks } = scan;
  const length = runLength(text, at);
  // A run that found no partner once has none further on either.
  if (ticks.get(length) === -1) return take(scan, length);
  for (let from = at + length; ;) {
    const close = text.indexOf('`', from);
    if (close < 0) {
      ticks.set(length, -1);
      return take(scan, length);
    }
    const found = runLength(text, close);
    if (found === length) {
      let inner = text.slice(at + length, close).replaceAll('\n', ' ');
      if (inner.startsWith(' ') && inner.endsWith(' ') && inner.trim() !== '') inner = inner.slice(1, -1);
      return push(scan, { kind: 'code', text: inner }, close + length - at);
    }
    from = close + found;
  }
}

/** `[label](target)`, or a picture, which becomes a link to it: the page loads nothing from elsewhere. */
function link(scan, open) {
  const { text, at, depth } = scan;
  const close = depth < DEPTH_MAX ? matching(text, open, '[', ']', LABEL_MAX) : -1;
  if (close < 0 || text[close + 1] !== '(') return take(scan, open + 1 - at);
  const end = matching(text, close + 1, '(', ')', TARGET_MAX);
  if (end < 0) return take(scan, open + 1 - at);
  const label = text.slice(open + 1, close);
  const target = text
    .slice(close + 2, end)
    .trim()
    .replace(/\s+["'(].*$/s, '')
    .replace(/^<(.*)>$/s, '$1');
  const href = safeHref(target);
  const length = end + 1 - at;
  if (href === null) {
    scan.plain += text.slice(at, end + 1);
    scan.at += length;
    return;
  }
  const children = inline(label, depth + 1);
  push(
    scan,
    { kind: 'link', href, children: children.length > 0 ? children : [{ kind: 'text', text: href }] },
    length,
  );
}

function matching(text, open, left, right, reach) {
  let level = 0;
  const end = Math.min(text.length, open + reach);
  for (let at = open; at < end; at += 1) {
    if (text[at] === '\\') at += 1;
    else if (text[at] === left) level += 1;
    else if (text[at] === right) {
      level -= 1;
      if (level === 0) return at;
    }
  }
  return -1;
}

function angle(scan) {
  const found = /^<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/i.exec(
    scan.text.slice(scan.at, scan.at + TARGET_MAX),
  );
  const href = found && safeHref(found[1]);
  if (!href) return take(scan);
  push(scan, { kind: 'link', href, children: [{ kind: 'text', text: found[1] }] }, found[0].length);
}

/** A bare address, without the punctuation of the sentence around it. */
function address(scan) {
  const { text, at } = scan;
  const before = at === 0 || /[\s(*_~"'>]/.test(text[at - 1]);
  const found = before && /^https?:\/\/[^\s<>"'`]{1,2000}/i.exec(text.slice(at, at + TARGET_MAX));
  if (!found) return take(scan);
  let shown = found[0].replace(/[.,:;!?*_~]+$/, '');
  if (shown.endsWith(')') && !shown.includes('(')) shown = shown.slice(0, -1);
  const href = safeHref(shown);
  if (!href) return take(scan);
  push(scan, { kind: 'link', href, children: [{ kind: 'text', text: shown }] }, shown.length);
}

/** A run of `*`, `_` or `~`, which may open or close emphasis. */
function run(scan) {
  const { text, at } = scan;
  const mark = text[at];
  const length = runLength(text, at);
  if (mark === '~' && length !== 2) return take(scan, length);
  const before = at === 0 ? ' ' : text[at - 1];
  const after = text[at + length] ?? ' ';
  const space = /\s/;
  const left =
    !space.test(after) && (!PUNCTUATION.test(after) || space.test(before) || PUNCTUATION.test(before));
  const right =
    !space.test(before) && (!PUNCTUATION.test(before) || space.test(after) || PUNCTUATION.test(after));
  const opens = mark === '_' ? left && (!right || PUNCTUATION.test(before)) : left;
  const closes = mark === '_' ? right && (!left || PUNCTUATION.test(after)) : right;
  push(scan, { kind: 'run', mark, length }, length);
  scan.runs.push({ mark, opens, closes, node: scan.nodes.at(-1) });
}

/** Pairs runs as CommonMark does: each closer with the nearest opener of its mark. */
function emphasize(scan) {
  const openers = [];
  for (const closer of scan.runs) {
    while (closer.closes && closer.node.length > 0) {
      const found = openers.findLastIndex(({ mark, node }) => mark === closer.mark && node.length > 0);
      if (found < 0) break;
      wrap(scan, openers[found], closer);
      openers.length = openers[found].node.length > 0 ? found + 1 : found;
    }
    if (closer.opens && closer.node.length > 0) openers.push(closer);
  }
}

function wrap(scan, opener, closer) {
  const used = opener.mark === '~' || (opener.node.length >= 2 && closer.node.length >= 2) ? 2 : 1;
  opener.node.length -= used;
  closer.node.length -= used;
  const from = scan.nodes.indexOf(opener.node) + 1;
  const to = scan.nodes.indexOf(closer.node, from);
  const kind = opener.mark === '~' ? 'del' : ['em', 'strong'][used - 1];
  scan.nodes.splice(from, to - from, { kind, children: tidy(scan.nodes.slice(from, to)) });
}

/** Runs that paired with nothing are text. */
function tidy(nodes) {
  return nodes
    .filter(({ kind, length }) => kind !== 'run' || length > 0)
    .map((node) => (node.kind === 'run' ? { kind: 'text', text: node.mark.repeat(node.length) } : node));
}
