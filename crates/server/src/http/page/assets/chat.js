// The conversation: what was said, and the reply that is being made. It knows nothing of how it looks.
//
// A message is {id, role: 'user', text, pictures}, {id, role: 'tool', callId, name, text} or
// {id, role: 'assistant', reasoning, text, calls, state, finish, stats, failure}, where state is 'waiting',
// 'reasoning', 'writing', 'done', 'stopped' or 'failed'.

import { Failure, chunks } from './api.js';
import { freshId } from './dom.js';
import { hasSubstance, requestFor } from './request.js';

const TITLE_CHARS = 60;
/** Milliseconds of a running reply that a closed page may lose. */
const KEEP_MS = 1000;
const RUNNING = ['waiting', 'reasoning', 'writing'];

/** Whether a message is a reply that is being made. */
export function isRunning(message) {
  return RUNNING.includes(message.state);
}

function freshChat() {
  const now = Date.now();
  return { id: freshId(), title: '', created: now, updated: now, messages: [] };
}

function freshReply() {
  return {
    id: freshId(),
    role: 'assistant',
    reasoning: '',
    text: '',
    calls: [],
    state: 'waiting',
    finish: null,
    stats: null,
    failure: null,
    reasoningMs: null,
  };
}

/**
 * Tells listeners: `opened` when all messages may have changed, `message` (detail: the message) when one did,
 * `busy` when a reply begins or ends, `kept` when the store has it, `failed` (detail: the Failure).
 */
export class Conversation extends EventTarget {
  #store;
  #model;
  #settings;
  #run = null;

  /** `model()` is the served id, `settings()` what was typed. */
  constructor(store, model, settings) {
    super();
    this.#store = store;
    this.#model = model;
    this.#settings = settings;
    this.chat = freshChat();
  }

  /** Whether a reply is being made. */
  get busy() {
    return this.#run !== null;
  }

  /** The id of the running request, as `/slots` has it; null if none runs. */
  get requestId() {
    return this.#run?.requestId ?? null;
  }

  get messages() {
    return this.chat.messages;
  }

  #tell(name, detail = null) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** Goes to a chat, or to a new one. A running reply is stopped. */
  open(chat = null) {
    this.stop();
    this.chat = chat ?? freshChat();
    // A reply that was running when the page was closed.
    for (const message of this.messages) if (isRunning(message)) message.state = 'stopped';
    this.#tell('opened');
  }

  /** Says something and lets the model reply. */
  send(text, pictures = []) {
    this.messages.push({ id: freshId(), role: 'user', text, pictures });
    if (this.chat.title === '') this.chat.title = text.slice(0, TITLE_CHARS) || 'Pictures';
    return this.#reply();
  }

  /** Makes the reply at `id` again; what came after it goes. */
  retry(id) {
    const at = this.messages.findIndex((message) => message.id === id);
    return this.#from(this.messages[at].role === 'assistant' ? at : at + 1);
  }

  /** Says something else instead of the user's message at `id`; what came after it goes. */
  edit(id, text) {
    const at = this.messages.findIndex((message) => message.id === id);
    const changed = { ...this.messages[at], id: freshId(), text };
    return this.#from(at, [changed]);
  }

  /** Goes on with a reply that was cut. */
  continue(id) {
    const message = this.messages.find((found) => found.id === id);
    return this.#reply(message);
  }

  /** Takes back the last retry or edit. */
  restore(messages) {
    this.stop();
    this.chat.messages = messages;
    this.#keep();
    this.#tell('opened');
  }

  /** Gives results of tool calls, as {callId, name, text}. */
  answer(results) {
    for (const result of results) this.messages.push({ id: freshId(), role: 'tool', ...result });
    return this.#reply();
  }

  /** Ends the running reply; what came stays. */
  stop() {
    this.#run?.abort.abort();
  }

  #from(at, added = []) {
    const before = [...this.messages];
    this.chat.messages = [...this.messages.slice(0, at), ...added];
    if (at === 0 && added.length > 0) this.chat.title = added[0].text.slice(0, TITLE_CHARS);
    if (before.length > at + 1) this.#tell('cut', before);
    return this.#reply();
  }

  async #reply(continued = null) {
    this.stop();
    const { chat } = this;
    const reply = continued ?? freshReply();
    Object.assign(reply, { state: 'waiting', finish: null, failure: null });
    const history = chat.messages.filter(
      (message) => message === continued || message.state !== 'failed' || hasSubstance(message),
    );
    const body = requestFor(this.#model(), history, this.#settings());
    if (!continued) chat.messages.push(reply);
    const run = {
      abort: new AbortController(),
      requestId: `page-${freshId()}`,
      began: performance.now(),
      kept: 0,
    };
    this.#run = run;
    this.#tell('opened');
    this.#tell('busy');
    this.#keep(chat);
    try {
      for await (const chunk of chunks(body, run.abort.signal, run.requestId)) {
        this.#take(reply, chunk, run);
        if (performance.now() - run.kept > KEEP_MS) {
          run.kept = performance.now();
          this.#keep(chat);
        }
      }
      reply.state = 'done';
    } catch (error) {
      this.#broken(reply, error);
    }
    if (this.#run === run) this.#run = null;
    this.#tell('message', reply);
    this.#tell('busy');
    this.#keep(chat);
  }

  #broken(reply, error) {
    if (error.name === 'AbortError') {
      reply.state = 'stopped';
      return;
    }
    if (!(error instanceof Failure)) console.error(error);
    const { status = 0, code = 'page', message, param = null, retryAfter = null } = error;
    reply.state = 'failed';
    reply.failure = { status, code, message, param, retryAfter };
    this.#tell('failed', reply.failure);
  }

  #take(reply, chunk, run) {
    const choice = chunk.choices[0];
    if (choice) {
      const { delta } = choice;
      if (delta.reasoning_content) {
        reply.reasoning += delta.reasoning_content;
        reply.state = 'reasoning';
        reply.reasoningMs = performance.now() - run.began;
      }
      if (delta.content) {
        reply.text += delta.content;
        reply.state = 'writing';
      }
      for (const call of delta.tool_calls ?? []) this.#call(reply, call);
      if (choice.finish_reason) reply.finish = choice.finish_reason;
    }
    if (chunk.usage) reply.stats = statsOf(chunk, run);
    this.#tell('message', reply);
  }

  #call(reply, { index, id, function: { name, arguments: args } }) {
    if (name) reply.calls[index] = { id, name, args: '' };
    reply.calls[index].args += args;
    reply.state = 'writing';
  }

  #keep(chat = this.chat) {
    chat.updated = Date.now();
    this.#store.put(chat).then((kept) => this.#tell('kept', kept));
  }
}

/** What the last chunk says of a reply. */
function statsOf({ usage, clary }, { requestId }) {
  return {
    requestId,
    promptTokens: usage.prompt_tokens,
    tokens: usage.completion_tokens,
    cachedTokens: usage.prompt_tokens_details.cached_tokens,
    reasoningTokens: usage.completion_tokens_details.reasoning_tokens,
    perSecond: clary?.timings?.tokens_per_s ?? null,
    firstMs: clary?.timings?.ttft_ms ?? null,
    proposed: clary?.draft?.proposed ?? 0,
    accepted: clary?.draft?.accepted ?? 0,
    seed: clary?.seed ?? null,
    notes: (clary?.notes ?? []).map((note) => (note.path ? `${note.code} at ${note.path}` : note.code)),
  };
}
