// Puts the page together: the server's facts, the conversation, and the views around it.

import { get, hasKey, health, useKey } from './api.js';
import { Conversation } from './chat.js';
import { Composer } from './composer.js';
import { openHelp, openKey, openSettings } from './dialogs.js';
import { copyText, h, iconButton, say, toast } from './dom.js';
import { Meter } from './meter.js';
import { read, write } from './settings.js';
import { listen, shortcuts } from './shortcuts.js';
import { Sidebar } from './sidebar.js';
import { Store } from './store.js';
import { themeSwitch } from './theme.js';
import { Thread, welcome } from './thread.js';
import { explain } from './words.js';

const LOADING_MS = 700;
const AWAY_MS = 3000;

const at = (id) => document.getElementById(id);
const store = new Store();
const server = { model: null, defaults: null, context: 0, canSee: false };
let typed = read();
let nextTry = null;

const conversation = new Conversation(
  store,
  () => server.model ?? 'default',
  () => typed,
);
const meter = new Meter(() => conversation.requestId);
const theme = themeSwitch();
const composer = new Composer(
  { send: (text, pictures) => conversation.send(text, pictures), stop: () => conversation.stop(), editLast },
  () => server.canSee,
);
const thread = new Thread(at('thread'), {
  retry: (id) => conversation.retry(id),
  edit: (id, text) => conversation.edit(id, text),
  continue: (id) => conversation.continue(id),
  answer: (results) => conversation.answer(results),
  isLast: (message) => conversation.messages.at(-1)?.id === message.id,
  way: takeWay,
});
const sidebar = new Sidebar(at('side'), { open: openChat, fresh, remove: removeChat });
const title = h('h1', { class: 'title', id: 'model' }, 'Clary');

const keys = shortcuts({
  stop: () => conversation.stop(),
  focus: () => composer.focus(),
  retry: retryLast,
  editLast,
  copy: copyLast,
  fresh,
  side: toggleSide,
  settings: () => settings(),
  theme: theme.next,
  help: () => openHelp(keys),
});

function lastOf(role) {
  return conversation.messages.findLast((message) => message.role === role);
}

function editLast() {
  const last = lastOf('user');
  if (last) thread.edit(last.id);
}

function retryLast() {
  const last = lastOf('assistant');
  if (last && !conversation.busy) conversation.retry(last.id);
}

async function copyLast() {
  const last = lastOf('assistant');
  if (last?.text && (await copyText(last.text))) toast('The last reply is copied.');
}

function fresh() {
  conversation.open();
  at('app').classList.remove('side-open');
  composer.focus();
}

function openChat(chat) {
  conversation.open(chat);
  at('app').classList.remove('side-open');
  composer.focus();
}

async function removeChat(chat) {
  const isCurrent = chat.id === conversation.chat.id;
  if (isCurrent) conversation.open();
  await store.remove(chat.id);
  showSide();
  toast('The chat is deleted.', 'Undo', async () => {
    await store.put(chat);
    if (isCurrent) conversation.open(chat);
    showSide();
  });
}

function toggleSide() {
  const wide = matchMedia('(min-width: 50rem)').matches;
  const shown = wide ? !at('app').classList.toggle('side-shut') : at('app').classList.toggle('side-open');
  at('side-button').setAttribute('aria-expanded', String(shown));
  if (shown) at('fresh').focus();
}

function settings(field = null) {
  openSettings(
    typed,
    server.defaults,
    (values) => {
      typed = values;
      write(typed);
      toast('The settings hold from the next reply on.');
    },
    field,
  );
}

function askKey() {
  const hint = hasKey()
    ? 'The last key was not accepted. Keys are lines of the server’s key file.'
    : 'Ask whoever runs the server for one. It is sent to this server only.';
  openKey(hint, (key, remember) => {
    useKey(key, remember);
    connect();
  });
}

function takeWay(way, id) {
  const failure = conversation.messages.find((message) => message.id === id)?.failure;
  switch (way) {
    case 'key':
      return askKey();
    case 'settings':
      return settings(failure?.param?.split(/[.[]/, 1)[0]);
    case 'fresh':
      return fresh();
    default:
      return conversation.retry(id);
  }
}

/** Says at the top of the page what keeps it from working; null says nothing. */
function notice(text, label = null, run = null) {
  const place = at('notice');
  place.hidden = text === null;
  if (text === null) return;
  place.replaceChildren(
    h('span', {}, text),
    label ? h('button', { type: 'button', class: 'button', onclick: run }, label) : '',
  );
}

/** Learns what the server is; again and again until it is ready. */
async function connect() {
  clearTimeout(nextTry);
  try {
    const { status, progress } = await health();
    if (status === 'loading') {
      meter.setState('wait', `loading ${Math.round((progress ?? 0) * 100)} %`);
      notice('The model is being loaded. You can write already; send when it is ready.');
      nextTry = setTimeout(connect, LOADING_MS);
      return;
    }
    const [models, props] = await Promise.all([get('/v1/models'), get('/props')]);
    const model = models.data[0];
    Object.assign(server, {
      model: model.id,
      context: model.context_length,
      canSee: props.modalities.vision,
      defaults: props.default_generation_settings.params,
    });
    title.textContent = model.id;
    document.title = `${model.id} · Clary`;
    meter.setState('ready', 'ready');
    notice(null);
    composer.refresh();
    showThread();
    meter.poll();
  } catch (failure) {
    refused(failure);
  }
}

function refused(failure) {
  if (failure.code === 'invalid_api_key') {
    meter.setState('away', 'key needed');
    notice('The server wants a key.', 'Enter a key', askKey);
    askKey();
    return;
  }
  const { title: words, text } = explain(failure);
  meter.setState('away', 'no answer');
  notice(`${words}. ${text}`, 'Try again', connect);
  nextTry = setTimeout(connect, AWAY_MS);
}

function showThread() {
  thread.show(conversation.messages, () =>
    welcome(server.model, server.canSee, (text) => composer.write(text)),
  );
}

function showSide() {
  sidebar.show(store.list(), conversation.chat.id);
}

function wire() {
  conversation.addEventListener('opened', () => {
    showThread();
    showSide();
    meter.clear();
    meter.reply(lastOf('assistant')?.stats, server.context);
  });
  conversation.addEventListener('message', ({ detail }) => {
    thread.update(detail);
    if (detail.stats) meter.reply(detail.stats, server.context);
  });
  conversation.addEventListener('busy', () => {
    composer.setBusy(conversation.busy);
    const words = {
      done: 'The reply is complete.',
      stopped: 'The reply was stopped.',
      failed: 'The reply failed.',
    };
    say(conversation.busy ? 'The reply begins.' : (words[lastOf('assistant')?.state] ?? ''));
    meter.poll();
  });
  conversation.addEventListener('cut', ({ detail }) => {
    toast('What came after it is replaced.', 'Undo', () => conversation.restore(detail));
  });
  conversation.addEventListener('kept', ({ detail }) => {
    showSide();
    if (!detail) toast('The browser has no room to keep this chat.');
  });
  conversation.addEventListener('failed', ({ detail }) => {
    if (detail.code === 'invalid_api_key' || detail.code === 'unreachable') connect();
  });
}

async function start() {
  at('bar').append(
    iconButton('menu', 'Chats (Alt B)', toggleSide, {
      id: 'side-button',
      'aria-controls': 'side',
      'aria-expanded': String(matchMedia('(min-width: 50rem)').matches),
    }),
    title,
    h('span', { class: 'spring' }),
    theme.element,
    iconButton('sliders', 'Settings (Alt S)', () => settings(), { id: 'settings-button' }),
    iconButton('keyboard', 'Keyboard (?)', () => openHelp(keys), { id: 'help-button' }),
  );
  at('foot').append(composer.element, meter.element);
  at('veil').addEventListener('click', toggleSide);
  composer.takeDrops(document.body);
  listen(keys);
  wire();
  const [newest] = await store.load();
  conversation.open(newest?.messages.length > 0 ? newest : null);
  composer.focus();
  connect();
}

start();
