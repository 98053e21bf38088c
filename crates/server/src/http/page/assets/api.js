// Calls to the server this page came from, with the user's key.

const KEY = 'clary.key';

/** An answer that is not the wished one: the server's words, or those of a connection that broke. */
export class Failure extends Error {
  constructor({ status = 0, code = 'unreachable', message, param = null, retryAfter = null }) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter });
  }
}

function kept(area) {
  try {
    return area().getItem(KEY);
  } catch {
    return null;
  }
}

let key = kept(() => sessionStorage) ?? kept(() => localStorage);

/** Uses a key from now on; it outlives this tab only if `remember`. Null forgets it. */
export function useKey(value, remember) {
  key = value;
  for (const [area, stays] of [
    [() => sessionStorage, !remember],
    [() => localStorage, remember],
  ]) {
    try {
      if (value !== null && stays) area().setItem(KEY, value);
      else area().removeItem(KEY);
    } catch {
      // Kept until the page is closed.
    }
  }
}

/** Whether a key is in use. */
export function hasKey() {
  return key !== null;
}

async function failureOf(response) {
  const retryAfter = Number(response.headers.get('retry-after')) || null;
  const said = await response.json().catch(() => null);
  const error = said?.error;
  const { status } = response;
  if (error && typeof error === 'object') {
    return new Failure({ status, retryAfter, code: error.code, message: error.message, param: error.param });
  }
  return new Failure({ status, retryAfter, code: 'unknown', message: `the server answered ${status}` });
}

async function ask(path, { body, signal, requestId } = {}) {
  const headers = {};
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (requestId) headers['X-Request-Id'] = requestId;
  if (body) headers['Content-Type'] = 'application/json';
  const options = { headers, signal, cache: 'no-store' };
  if (body) Object.assign(options, { method: 'POST', body: JSON.stringify(body) });
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Failure({ message: 'the server does not answer' });
  }
}

/** The JSON of a route. */
export async function get(path) {
  const response = await ask(path);
  if (!response.ok) throw await failureOf(response);
  return response.json();
}

/** `/health`, whose 503 is an answer. */
export async function health() {
  return (await ask('/health')).json();
}

/** The chunks of a streamed reply, one by one. Throws a Failure if the stream breaks or says so. */
export async function* chunks(body, signal, requestId) {
  const response = await ask('/v1/chat/completions', { body, signal, requestId });
  if (!response.ok) throw await failureOf(response);
  for await (const data of events(response.body)) {
    if (data === '[DONE]') return;
    const chunk = JSON.parse(data);
    // A seed has more digits than a number of this language holds.
    if (chunk.clary) chunk.clary.seed = /"seed":(\d+)/.exec(data)?.[1] ?? null;
    if (chunk.error) throw new Failure({ status: 200, ...chunk.error });
    yield chunk;
  }
  throw new Failure({ code: 'broken', message: 'the connection ended in the middle of the reply' });
}

/** The data lines of an event stream. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new Failure({ code: 'broken', message: 'the connection broke in the middle of the reply' });
    }
    if (part.done) return;
    const lines = (rest + part.value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith('data: ')) yield line.slice('data: '.length).trimEnd();
    }
  }
}
