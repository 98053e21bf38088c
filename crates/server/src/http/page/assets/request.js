// A conversation as the body of a request.

import { members } from './settings.js';

/** What is known of every reply besides its text. */
const CLARY = { timings: true, draft: true, cache: true, notes: true };

function content(message) {
  if (!message.pictures?.length) return message.text;
  const pictures = message.pictures.map((url) => ({ type: 'image_url', image_url: { url } }));
  return message.text ? [...pictures, { type: 'text', text: message.text }] : pictures;
}

function assistant(message) {
  const made = { role: 'assistant', content: message.text || null };
  if (message.reasoning) made.reasoning_content = message.reasoning;
  if (message.calls.length > 0) {
    made.tool_calls = message.calls.map(({ id, name, args }) => ({
      id,
      type: 'function',
      function: { name, arguments: args },
    }));
  }
  return made;
}

function said(message) {
  switch (message.role) {
    case 'user':
      return { role: 'user', content: content(message) };
    case 'tool':
      return { role: 'tool', tool_call_id: message.callId, content: message.text };
    default:
      return assistant(message);
  }
}

/** Whether an assistant message says anything that a later turn can build on. */
export function hasSubstance(message) {
  return (
    message.role !== 'assistant' ||
    message.text !== '' ||
    message.calls.length > 0 ||
    message.reasoning !== ''
  );
}

/** The request for the next message after `messages`. */
export function requestFor(model, messages, typed) {
  const system = typed.system?.trim() ? [{ role: 'system', content: typed.system }] : [];
  return {
    model,
    messages: [...system, ...messages.filter(hasSubstance).map(said)],
    stream: true,
    stream_options: { include_usage: true },
    clary: CLARY,
    ...members(typed),
  };
}
