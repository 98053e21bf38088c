// What went wrong, in plain words, and what can be done about it.

/** Ways on that a failure may offer; `chat.js` and `main.js` know how each is done. */
export const WAYS = {
  retry: 'Try again',
  key: 'Enter a key',
  settings: 'Open settings',
  fresh: 'Start a new chat',
};

const BY_CODE = {
  unreachable: {
    title: 'The server does not answer',
    text: 'It may have been stopped, or the network is down. What you wrote is kept.',
    ways: ['retry'],
  },
  broken: {
    title: 'The reply broke off',
    text: 'The connection ended before the reply did. What came is kept.',
    ways: ['retry'],
  },
  invalid_api_key: {
    title: 'The server wants a key',
    text: 'Ask whoever runs it for one: it is a line of the file given as --api-key-file.',
    ways: ['key'],
  },
  context_length_exceeded: {
    title: 'The conversation is too long',
    text: 'It no longer fits the context of the model. Edit an earlier message to go on from there.',
    ways: ['fresh'],
  },
  queue_full: {
    title: 'Too many requests are waiting',
    text: 'Every slot is busy and the queue is full.',
    ways: ['retry'],
  },
  queue_timeout: {
    title: 'No slot became free in time',
    text: 'Every slot of the server stayed busy.',
    ways: ['retry'],
  },
  key_limit: {
    title: 'Your key is busy',
    text: 'It has as many replies running as it may have. Wait for one of them to end.',
    ways: ['retry'],
  },
  loading: {
    title: 'The model is still being loaded',
    text: 'Try again when the page says that it is ready.',
    ways: ['retry'],
  },
  draining: {
    title: 'The server is about to end',
    text: 'It finishes running replies and takes no new ones. Try again when it is back.',
    ways: ['retry'],
  },
  numerical_fault: {
    title: 'The model computed something that is not a number',
    text: 'The reply was ended, because what follows could not be trusted. Please report this.',
    ways: ['retry'],
  },
  device_fault: {
    title: 'The device failed',
    text: 'The server has to be started again; its log says what happened.',
    ways: ['retry'],
  },
  body_too_large: {
    title: 'The message is too large',
    text: 'Send fewer or smaller pictures.',
    ways: ['fresh'],
  },
  template_error: {
    title: 'The chat template refuses this conversation',
    text: 'Edit a message, or the system prompt.',
    ways: ['settings', 'fresh'],
  },
};

const REFUSED = {
  title: 'The server refused the request',
  text: 'One of the settings or messages is not as it should be.',
  ways: ['settings', 'retry'],
};

const FAULT = { title: 'The server failed', text: 'Its log says why.', ways: ['retry'] };

/** `{title, text, detail, ways}` of a failure. `detail` is the server's own sentence. */
export function explain({ status, code, message, param, retryAfter }) {
  const known = BY_CODE[code] ?? (status >= 400 && status < 500 ? REFUSED : FAULT);
  const wait = retryAfter ? ` It asks to wait ${retryAfter} s.` : '';
  return { ...known, text: known.text + wait, detail: message, param };
}
