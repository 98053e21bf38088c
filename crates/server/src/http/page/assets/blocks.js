// Markdown by blocks: text to a list of {kind, …}. HTML is text. Every block has `raw`, its own source, by
// which a view can tell that it did not change.

import { inline } from './inline.js';

const DEPTH_MAX = 10;
const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +|$)/;
const TASK = /^\[([ xX])\] /;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const COLUMNS_MAX = 64;

/** The blocks of a text. */
export function blocks(text) {
  return parse(text.replaceAll('\r\n', '\n').replaceAll('\t', '    ').split('\n'), 0);
}

const isBlank = (line) => line.trim() === '';
const indentOf = (line) => line.length - line.trimStart().length;

function parse(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, next] = blockAt(lines, at, depth);
    found.push({ ...block, raw: lines.slice(at, next).join('\n') });
    at = next;
  }
  return found;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  if (fenceOf(line)) return fenced(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    const words = heading[2]
      .trim()
      .replace(/(^|[ ])#+$/, '')
      .trim();
    return [{ kind: 'heading', level: heading[1].length, inline: inline(words) }, at + 1];
  }
  if (RULE.test(line)) return [{ kind: 'rule' }, at + 1];
  if (depth < DEPTH_MAX) {
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (ITEM.test(line)) return list(lines, at, depth);
  }
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function fenceOf(line) {
  const fence = FENCE.exec(line);
  return fence && !(fence[2][0] === '`' && fence[3].includes('`')) ? fence : null;
}

/** A fence that is not closed yet goes to the end: so it looks while it is being written. */
function fenced(lines, at) {
  const [, indent, fence, info] = fenceOf(lines[at]);
  const text = [];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const close = /^ {0,3}(`{3,}|~{3,}) *$/.exec(lines[end]);
    if (close && close[1][0] === fence[0] && close[1].length >= fence.length) break;
    text.push(lines[end].slice(Math.min(indent.length, indentOf(lines[end]))));
  }
  const language = info.trim().split(/\s/, 1)[0].slice(0, 30);
  return [{ kind: 'code', language, text: text.join('\n') }, Math.min(end + 1, lines.length)];
}

/** Whether a line ends a paragraph before it. */
function interrupts(lines, at, depth) {
  const line = lines[at];
  const item = depth < DEPTH_MAX && ITEM.exec(line);
  return (
    isBlank(line) ||
    fenceOf(line) !== null ||
    HEADING.test(line) ||
    RULE.test(line) ||
    (depth < DEPTH_MAX && QUOTE.test(line)) ||
    (item && item[0].length < line.length) ||
    isTable(lines, at)
  );
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !interrupts(lines, end, depth)) end += 1;
  const text = lines
    .slice(at, end)
    .map((line) => line.trimStart())
    .join('\n')
    .trimEnd();
  return [{ kind: 'paragraph', inline: inline(text) }, end];
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    if (QUOTE.test(lines[end])) inner.push(lines[end].replace(/^ {0,3}> ?/, ''));
    else if (interrupts(lines, end, depth) || isBlank(inner.at(-1))) break;
    else inner.push(lines[end]);
  }
  return [{ kind: 'quote', blocks: parse(inner, depth + 1) }, end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const kindOf = (mark) => mark.at(-1);
  const ordered = /\d/.test(first[2]);
  const items = [];
  let tight = true;
  let end = at;
  while (end < lines.length) {
    const mark = ITEM.exec(lines[end]);
    if (!mark || kindOf(mark[2]) !== kindOf(first[2]) || (RULE.test(lines[end]) && items.length > 0)) break;
    const [inner, next] = itemLines(lines, end, mark, depth);
    const task = TASK.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(task[0].length);
    const trailing = inner.length - inner.findLastIndex((line) => !isBlank(line)) - 1;
    if (inner.slice(0, inner.length - trailing).some(isBlank)) tight = false;
    if (trailing > 0 && next < lines.length && ITEM.test(lines[next])) tight = false;
    items.push({ checked: task ? task[1] !== ' ' : null, blocks: parse(inner, depth + 1) });
    end = next;
  }
  const start = ordered ? Number.parseInt(first[2], 10) : null;
  return [{ kind: 'list', ordered, start, tight, items }, end];
}

/** The lines of one item without its mark, and where they end. Two spaces are enough to belong to it. */
function itemLines(lines, at, mark, depth) {
  const offset = Math.min(mark[0].length, mark[1].length + mark[2].length + 4);
  const inner = [lines[at].slice(mark[0].length)];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (isBlank(line)) {
      const next = lines.slice(end + 1, end + 3).find((later) => !isBlank(later));
      const goesOn = next !== undefined && (indentOf(next) >= Math.min(offset, 2) || ITEM.test(next));
      if (!goesOn) break;
      inner.push('');
    } else if (indentOf(line) >= Math.min(offset, mark[1].length + 2)) {
      inner.push(line.slice(Math.min(indentOf(line), offset)));
    } else if (isBlank(inner.at(-1)) || interrupts(lines, end, depth)) {
      break;
    } else {
      inner.push(line);
    }
  }
  return [inner, end];
}

function isTable(lines, at) {
  return (
    lines[at].includes('|') &&
    at + 1 < lines.length &&
    lines[at + 1].includes('-') &&
    TABLE_RULE.test(lines[at + 1]) &&
    cells(lines[at]).length === cells(lines[at + 1]).length
  );
}

function cells(line) {
  const text = line.trim().replace(/^\|/, '').replace(/\|$/, '');
  const found = [''];
  let ticks = false;
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === '`') ticks = !ticks;
    if (text[at] === '\\' && text[at + 1] === '|') {
      found[found.length - 1] += '|';
      at += 1;
    } else if (text[at] === '|' && !ticks) found.push('');
    else found[found.length - 1] += text[at];
  }
  return found.slice(0, COLUMNS_MAX).map((cell) => cell.trim());
}

function table(lines, at) {
  const head = cells(lines[at]);
  const align = cells(lines[at + 1]).map((rule) => {
    if (rule.endsWith(':')) return rule.startsWith(':') ? 'center' : 'right';
    return 'left';
  });
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes('|'); end += 1) {
    const row = cells(lines[end]);
    rows.push(head.map((_, column) => inline(row[column] ?? '')));
  }
  return [{ kind: 'table', align, head: head.map((cell) => inline(cell)), rows }, end];
}
