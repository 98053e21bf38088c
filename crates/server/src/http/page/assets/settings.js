// Settings of requests: what there is, what was typed, and what it means in a request. Empty is the server's
// own default.

const KEY = 'clary.settings';
const ON_OFF = [
  ['', 'As the server'],
  ['on', 'On'],
  ['off', 'Off'],
];

const number = (name, label, min, max, hint, step = 'any') => ({
  name,
  label,
  kind: 'number',
  min,
  max,
  step,
  hint,
});

/** All settings, in groups, in the order of the form. `shown` names the server's default in /props. */
export const GROUPS = [
  {
    title: 'Conversation',
    fields: [
      {
        name: 'system',
        label: 'System prompt',
        kind: 'text',
        rows: 4,
        hint: 'Comes before every conversation.',
      },
      {
        name: 'thinking',
        label: 'Thinking',
        kind: 'choice',
        options: ON_OFF,
        hint: 'Whether the model reasons before it answers.',
      },
      number('thinking_budget', 'Thinking budget', -1, null, 'Tokens of reasoning; -1 is no limit.', 1),
    ],
  },
  {
    title: 'Sampling',
    fields: [
      {
        ...number('temperature', 'Temperature', 0, 5, '0 always takes the likeliest token.'),
        shown: 'temperature',
      },
      { ...number('top_p', 'Top p', 0, 1, 'Share of probability kept.'), shown: 'top_p' },
      { ...number('top_k', 'Top k', 0, null, 'Tokens kept; 0 is all.', 1), shown: 'top_k' },
      { ...number('min_p', 'Min p', 0, 1, 'Least share of the best one.'), shown: 'min_p' },
      number('presence_penalty', 'Presence penalty', -2, 2, 'Against tokens that were used.'),
      {
        ...number('repetition_penalty', 'Repetition penalty', 0, 10, '1 is none.'),
        shown: 'repetition_penalty',
      },
      number('seed', 'Seed', 0, 2 ** 64, 'The same seed gives the same reply.', 1),
      number('max_tokens', 'Longest reply', 1, null, 'Tokens, reasoning included.', 1),
    ],
  },
  {
    title: 'More',
    fields: [
      { name: 'stop', label: 'Stop strings', kind: 'text', rows: 2, hint: 'One a line.' },
      {
        name: 'drafts',
        label: 'Drafts',
        kind: 'choice',
        options: ON_OFF,
        hint: 'Change the speed and never the reply.',
      },
      {
        name: 'tools',
        label: 'Tools',
        kind: 'text',
        rows: 5,
        code: true,
        hint: 'A JSON array of tools as in OpenAI’s API. You answer the calls by hand.',
      },
    ],
  },
];

const FIELDS = GROUPS.flatMap((group) => group.fields);

/** What was typed, by name. */
export function read() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

/** Keeps what was typed. */
export function write(typed) {
  try {
    localStorage.setItem(KEY, JSON.stringify(typed));
  } catch {
    // Kept until the page is closed.
  }
}

/** What is wrong with a typed value, or null. */
export function mistake(field, text) {
  if (text === '') return null;
  if (field.kind === 'number') {
    const value = Number(text);
    const range = `a number from ${field.min}${field.max === null ? ' on' : ` to ${field.max}`}`;
    const whole = field.step !== 1 || Number.isInteger(value);
    const inside = value >= field.min && (field.max === null || value <= field.max);
    return whole && inside
      ? null
      : `${field.label} takes ${field.step === 1 ? 'a whole number, ' : ''}${range}.`;
  }
  if (field.name === 'tools') {
    try {
      return Array.isArray(JSON.parse(text)) ? null : 'Tools must be a JSON array.';
    } catch (error) {
      return `Tools are not JSON: ${error.message}.`;
    }
  }
  return null;
}

/** A number as it was typed: a seed may have more digits than a number of this language holds. */
function exact(text) {
  return JSON.rawJSON && /^(0|[1-9]\d*)$/.test(text) ? JSON.rawJSON(text) : Number(text);
}

/** The members that settings add to a request. */
export function members(typed) {
  const wish = {};
  for (const { name, kind } of FIELDS) {
    if (kind === 'number' && typed[name]) wish[name] = exact(typed[name]);
  }
  if (typed.thinking) wish.chat_template_kwargs = { enable_thinking: typed.thinking === 'on' };
  if (typed.drafts) wish.speculative = { enabled: typed.drafts === 'on' };
  const stops = (typed.stop ?? '').split('\n').filter((line) => line !== '');
  if (stops.length > 0) wish.stop = stops;
  if (typed.tools) wish.tools = JSON.parse(typed.tools);
  return wish;
}
