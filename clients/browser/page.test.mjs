// The built-in page in a real browser, on the built program and the demo model.

import assert from 'node:assert/strict';
import { mkdirSync, readFileSync } from 'node:fs';
import { after, before, describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';

import { launch, openPage } from './browser.mjs';
import { say } from './model.mjs';
import { serve } from './serve.mjs';

const SHOTS = process.env.SHOTS ?? fileURLToPath(new URL('./shots/', import.meta.url));
const LONG = 'Tell me a long story about a river.';
const DOT =
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==';
const WEATHER = [
  {
    type: 'function',
    function: {
      name: 'get_weather',
      description: 'Get the current weather for a city.',
      parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
    },
  },
];

let browser;
let server;

before(async () => {
  mkdirSync(SHOTS, { recursive: true });
  [browser, server] = await Promise.all([
    launch(),
    serve(['--draft', '2', '--temperature', '0', '--ctx', '4096']),
  ]);
});

after(async () => {
  await browser?.close();
  assert.equal(await server?.stop(), 0, 'the server ends in good order');
});

const done = (page) => page.waitForSelector('#go:not(.stop)');

async function ready(page) {
  await page.waitForSelector('.state[data-state=ready]');
}

async function send(page, text) {
  await page.fill('#prompt', text);
  await page.keyboard.press('Enter');
}

/** Sends and waits for the whole reply; its text. */
async function chat(page, text) {
  await send(page, text);
  await page.waitForSelector('#go.stop, .reply:last-child:not(.running)');
  await done(page);
  return lastReply(page);
}

function lastReply(page) {
  return page.locator('.reply').last().locator('> .prose').innerText();
}

function count(page, selector) {
  return page.locator(selector).count();
}

async function setting(page, values) {
  await page.click('#settings-button');
  for (const [name, value] of Object.entries(values)) {
    const field = page.locator(`#setting-${name}`);
    if ((await field.evaluate((element) => element.tagName)) === 'SELECT') await field.selectOption(value);
    else await field.fill(value);
  }
  await page.click('#save-settings');
  await page.locator('.toast').getByLabel('Close').click();
}

/** Runs `body` on a fresh page that must not complain but of what `allowed` matches. */
async function onPage(body, { url = server.url, allowed = null, ...options } = {}) {
  const { page, context, complaints, outside } = await openPage(browser, url, options);
  try {
    await body(page, context);
  } catch (error) {
    await page.screenshot({ path: `${SHOTS}/failed.png` });
    error.message += `\n(page: ${complaints.join(' | ') || 'no complaints'}; see ${SHOTS}/failed.png)`;
    throw error;
  } finally {
    await context.close();
  }
  assert.deepEqual(
    complaints.filter((text) => !allowed?.test(text)),
    [],
    'the browser complains of nothing',
  );
  assert.deepEqual(outside, [], 'nothing is asked of other servers');
}

describe('a conversation', () => {
  test('streams, folds reasoning, shows numbers, and is there after a reload', () =>
    onPage(async (page) => {
      await ready(page);
      assert.equal(await page.evaluate(() => document.activeElement.id), 'prompt');
      await page.screenshot({ path: `${SHOTS}/welcome.png` });
      assert.match(await chat(page, 'What is 37 + 58?'), /95/);
      const details = page.locator('.reasoning').first();
      assert.equal(await details.evaluate((element) => element.open), false, 'reasoning begins folded');
      await details.locator('summary').click();
      assert.match(await details.innerText(), /ones: 7 \+ 8/);
      const numbers = await page.locator('.numbers').innerText();
      for (const wanted of [/\d+ tokens/, /[\d.]+ tok\/s/, /drafts \d+ %/, /cached 0 of 21/]) {
        assert.match(numbers, wanted);
      }
      await chat(page, 'What is 12 + 30?');
      const meter = await page.locator('#meter').innerText();
      assert.match(
        meter,
        /ready[\s\S]*tok\/s[\s\S]*drafts \d+ %[\s\S]*cached [1-9]\d* of \d+[\s\S]*of 4,096/,
      );
      const said = () => page.locator('.bubble, .reply > .prose, .numbers').allInnerTexts();
      const before = await said();
      await page.screenshot({ path: `${SHOTS}/light.png` });
      await page.reload();
      await ready(page);
      assert.deepEqual(await said(), before);
      assert.equal(await count(page, '.chat'), 1);
    }));

  test('grows while it streams, and stops at Esc', () =>
    onPage(async (page) => {
      await ready(page);
      await setting(page, {
        thinking: 'off',
        max_tokens: '3000',
        temperature: '1',
        seed: '18446744073709551615',
      });
      const request = page.waitForRequest('**/v1/chat/completions');
      await page.route('**/v1/chat/completions', async (route) => {
        // Without an end token the reply is long enough to be stopped.
        const body = route.request().postData().replace(/^\{/, '{"ignore_eos":true,');
        await route.continue({ postData: body });
      });
      await send(page, LONG);
      assert.match((await request).postData(), /"seed":18446744073709551615/, 'a seed keeps its digits');
      const length = () =>
        page
          .locator('.reply')
          .last()
          .innerText()
          .then((text) => text.length);
      await page.waitForFunction(() => document.querySelector('.reply > .prose')?.innerText.length > 20);
      const early = await length();
      await page.waitForFunction(
        (least) => document.querySelector('.reply').innerText.length > least + 40,
        early,
      );
      // Both at one moment: a fast machine may end the reply between two looks.
      await page.waitForFunction(() => {
        const slots = document.querySelector('.slots');
        const decodes = slots?.querySelector('i[data-state=decode]');
        return decodes && /1 of \d slots busy/.test(slots.getAttribute('aria-label'));
      });
      await page.waitForFunction(() => /tok\/s/.test(document.querySelector('#meter').innerText));
      await page.keyboard.press('Escape');
      await page.waitForSelector('#go:not(.stop)');
      assert.match(await page.locator('.numbers').innerText(), /stopped/);
      await page.waitForFunction(() => document.querySelector('.slots').title.startsWith('0 of'));
      const stopped = await length();
      await page.unroute('**/v1/chat/completions');
      await page.click('text=Go on');
      await page.waitForSelector('#go.stop');
      await page.keyboard.press('Escape');
      await done(page);
      assert.equal(await count(page, '.reply'), 1, 'going on adds to the same reply');
      assert.ok((await length()) > stopped - 20);
    }));

  test('retries, edits, takes back, and goes without a mouse', () =>
    onPage(async (page) => {
      await ready(page);
      await setting(page, { thinking: 'off' });
      assert.match(await chat(page, 'What is 37 + 58?'), /95/);
      assert.match(await chat(page, 'What is 12 + 30?'), /42/);
      await page.keyboard.press('Alt+KeyR');
      await page.waitForSelector('#go.stop, .reply:last-child:not(.running)');
      await done(page);
      assert.match(await lastReply(page), /42/);
      assert.equal(await count(page, '.reply'), 2);
      await page.locator('.message.user').first().hover();
      await page.locator('.message.user').first().getByLabel('Edit this message').click();
      await page.keyboard.press('Control+KeyA');
      await page.keyboard.type('What is 20 + 21?');
      await page.keyboard.press('Enter');
      await page.waitForFunction(() =>
        document.querySelector('.reply:not(.running) > .prose')?.innerText.includes('41'),
      );
      assert.equal(await count(page, '.message'), 2, 'what followed an edited message is gone');
      await page.click('.toast >> text=Undo');
      await page.waitForFunction(() => document.querySelectorAll('.message').length === 4);
      await page.focus('#prompt');
      await page.keyboard.press('ArrowUp');
      assert.equal(await page.evaluate(() => document.activeElement.value), 'What is 12 + 30?');
      await page.keyboard.press('Escape');
      assert.equal(await count(page, '.editor'), 0);
      await page.keyboard.press('Alt+KeyN');
      assert.equal(await count(page, '.message'), 0);
      assert.equal(await page.evaluate(() => document.activeElement.id), 'prompt');
      assert.equal(await count(page, '.chat'), 1);
      await page.locator('.chat-open').click();
      assert.equal(await count(page, '.message'), 4);
      await page.locator('.chat').hover();
      await page
        .locator('.chat')
        .getByLabel(/Delete/)
        .click();
      await page.waitForSelector('.none');
      await page.click('.toast >> text=Undo');
      await page.waitForSelector('.chat');
    }));

  test('shows calls of tools and takes their results', () =>
    onPage(async (page) => {
      await ready(page);
      await setting(page, { thinking: 'off', tools: JSON.stringify(WEATHER) });
      await send(page, 'What is the weather in Paris?');
      await page.waitForSelector('.call textarea');
      assert.match(await page.locator('.call').innerText(), /get_weather[\s\S]*"city": "Paris"/);
      await page.fill('.call textarea', '{"temperature": 21, "sky": "clear"}');
      await page.screenshot({ path: `${SHOTS}/tools.png` });
      await page.click('text=Send the result');
      await page.waitForSelector('.result');
      await done(page);
      assert.equal(await count(page, '.failure'), 0);
      assert.notEqual((await lastReply(page)).trim(), '');
    }));
});

describe('what is shown', () => {
  const HOSTILE = [
    '# Title <script>window.owned = 1</script>',
    '<img src=x onerror="window.owned = 1"> <b>plain</b>',
    '[a](javascript:window.owned=1) [b](data:text/html,x)',
    '![c](https://example.org/p.png) [d](https://example.org/)',
    '<a href="javascript:window.owned=1">e</a> <https://example.org/f>',
    '```html\n<script>window.owned = 1</script>\n```',
    '| a | b |\n|---|--:|\n| <i>x</i> | `y` |',
    '1. one\n   - *two*\n     > **three**',
    '[['.repeat(3000),
    '*_'.repeat(3000),
    '>'.repeat(3000),
  ].join('\n\n');

  test('Markdown never becomes markup', () =>
    onPage(async (page) => {
      await ready(page);
      await say(page, HOSTILE);
      await chat(page, '<b>me</b>');
      assert.equal(await page.evaluate(() => window.owned), undefined);
      assert.equal(await count(page, '.message :is(script, img, iframe, b, i):not(.waiting i)'), 0);
      const links = await page
        .locator('.reply a')
        .evaluateAll((all) => all.map((link) => [link.href, link.rel]));
      const rel = 'noopener noreferrer';
      const wanted = ['p.png', '', 'f'].map((path) => [`https://example.org/${path}`, rel]);
      assert.deepEqual(links, wanted);
      assert.equal(await page.locator('.bubble p').innerText(), '<b>me</b>');
      assert.equal(await page.locator('.reply .h1').innerText(), 'Title <script>window.owned = 1</script>');
      assert.equal(await count(page, '.reply ol > li > ul > li blockquote strong'), 1);
      assert.equal(await count(page, '.reply td.to-right code'), 1);
    }));

  test('code is copied as it stands', () =>
    onPage(
      async (page) => {
        await ready(page);
        await say(page, 'See:\n\n```python\nprint("<&>")\n\n    x\n```\n');
        await chat(page, 'code');
        await page.getByLabel('Copy code').click();
        assert.equal(await page.evaluate(() => navigator.clipboard.readText()), 'print("<&>")\n\n    x');
      },
      { permissions: ['clipboard-read', 'clipboard-write'] },
    ));

  test('light and dark, kept over a reload', () =>
    onPage(async (page) => {
      await ready(page);
      const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
      const light = await ground();
      await page.keyboard.press('Alt+KeyT');
      assert.equal(await ground(), light);
      await page.keyboard.press('Alt+KeyT');
      const dark = await ground();
      assert.notEqual(dark, light);
      await page.reload();
      await ready(page);
      assert.equal(await ground(), dark);
      await chat(page, 'What is 37 + 58?');
      await page.locator('.reasoning summary').click();
      await page.screenshot({ path: `${SHOTS}/dark.png` });
    }));

  test('a telephone', () =>
    onPage(
      async (page) => {
        await ready(page);
        await chat(page, 'What is 37 + 58?');
        const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
        assert.equal(wide, false, 'nothing is wider than the window');
        await page.keyboard.press('Alt+KeyB');
        assert.equal(await page.locator('#fresh').isVisible(), true);
        await page.screenshot({ path: `${SHOTS}/phone.png` });
      },
      { viewport: { width: 390, height: 760 }, reducedMotion: 'reduce' },
    ));

  test('a wide table and a long reply on a telephone', () =>
    onPage(
      async (page) => {
        await ready(page);
        const table = '| method | stable | complexity | remark |\n|---|:-:|--:|---|\n';
        const row = '| `select_nth_unstable` | no | O(n) | pattern-defeating, and a partition only |\n';
        await say(page, `${table}${row.repeat(30)}`);
        await chat(page, 'Show me a table.');
        const pieces = await page.locator('.reply th').evaluateAll((heads) =>
          heads.map((head) => {
            const range = document.createRange();
            range.selectNodeContents(head);
            return range.getClientRects().length;
          }),
        );
        assert.deepEqual(pieces, [1, 1, 1, 1], 'words are not cut');
        assert.equal(await page.evaluate(() => document.documentElement.scrollWidth > innerWidth), false);
        await page.locator('.thread').evaluate((thread) => thread.scrollTo(0, 0));
        const end = page.getByLabel('Go to the end');
        await end.waitFor();
        const button = await end.boundingBox();
        const composer = await page.locator('.composer').boundingBox();
        assert.ok(button.y + button.height <= composer.y, 'the way to the end is not hidden');
        await page.screenshot({ path: `${SHOTS}/table.png` });
        await end.click();
        await end.waitFor({ state: 'hidden' });
      },
      { viewport: { width: 390, height: 760 }, reducedMotion: 'reduce' },
    ));

  test('the whole page can be reached by Tab, and everything has a name', () =>
    onPage(async (page) => {
      await ready(page);
      await chat(page, 'What is 37 + 58?');
      const nameless = await page.evaluate(() =>
        [...document.querySelectorAll('button, input, textarea, select, a')]
          .filter((element) => !(element.ariaLabel || element.innerText || element.labels?.length))
          .map((element) => element.outerHTML),
      );
      assert.deepEqual(nameless, []);
      await page.focus('.skip');
      const order = [];
      for (let step = 0; step < 40 && !order.includes('go'); step += 1) {
        await page.keyboard.press('Tab');
        order.push(await page.evaluate(() => document.activeElement.id || document.activeElement.className));
      }
      const first = (id) => order.indexOf(id);
      for (const id of ['fresh', 'side-button', 'theme', 'settings-button', 'help-button', 'prompt', 'go']) {
        assert.ok(first(id) >= 0, `${id} is reached: ${order}`);
      }
      assert.ok(first('fresh') < first('settings-button') && first('settings-button') < first('prompt'));
      await page.keyboard.press('Alt+KeyS');
      assert.equal(await page.evaluate(() => document.activeElement.id), 'setting-system');
      await page.keyboard.press('Escape');
      await page.waitForSelector('dialog', { state: 'detached' });
      await page.waitForFunction(() => document.activeElement.id === 'go');
    }));
});

describe('settings', () => {
  test('go into the request, and nonsense does not', () =>
    onPage(async (page) => {
      await ready(page);
      const bodies = await say(page, 'Yes.');
      await page.click('#settings-button');
      assert.equal(await page.locator('#setting-top_p').getAttribute('placeholder'), '0.9 (server)');
      await page.fill('#setting-temperature', '9');
      await page.click('#save-settings');
      assert.match(await page.locator('.problem').innerText(), /Temperature takes a number from 0 to 5/);
      await page.fill('#setting-tools', '{');
      await page.fill('#setting-temperature', '0.5');
      await page.click('#save-settings');
      assert.match(await page.locator('.problem').innerText(), /Tools are not JSON/);
      await page.fill('#setting-tools', '');
      await page.fill('#setting-system', 'Be brief.');
      await page.fill('#setting-stop', 'END\nFIN');
      await page.selectOption('#setting-drafts', 'off');
      await page.click('#save-settings');
      await chat(page, 'Hello');
      const [body] = bodies;
      assert.deepEqual(body.messages, [
        { role: 'system', content: 'Be brief.' },
        { role: 'user', content: 'Hello' },
      ]);
      assert.equal(body.temperature, 0.5);
      assert.deepEqual(body.stop, ['END', 'FIN']);
      assert.deepEqual(body.speculative, { enabled: false });
      assert.equal('top_p' in body, false, 'what is left empty is left to the server');
    }));

  test('pictures go along where the model can see, and are refused where not', () =>
    onPage(async (page) => {
      const paste = () =>
        page.evaluate((base64) => {
          const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
          const data = new DataTransfer();
          data.items.add(new File([bytes], 'dot.png', { type: 'image/png' }));
          data.items.add(new File(['x'], 'x.txt', { type: 'text/plain' }));
          document
            .querySelector('#prompt')
            .dispatchEvent(
              new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true }),
            );
        }, DOT);
      let vision = false;
      await page.route('**/props', async (route) => {
        const response = await route.fetch();
        await route.fulfill({ response, json: { ...(await response.json()), modalities: { vision } } });
      });
      await page.reload();
      await ready(page);
      await paste();
      assert.match(await page.locator('.toast').innerText(), /cannot see pictures/);
      assert.equal(await page.locator('#add-picture').isVisible(), false);
      vision = true;
      await page.reload();
      await ready(page);
      assert.equal(await page.locator('#add-picture').isVisible(), true);
      await paste();
      await page.waitForSelector('.thumb');
      assert.match(await page.locator('.toast').innerText(), /x\.txt is not a PNG/);
      const bodies = await say(page, 'A dot.');
      await chat(page, 'What is it?');
      const [picture, text] = bodies[0].messages[0].content;
      assert.equal(picture.image_url.url, `data:image/png;base64,${DOT}`);
      assert.deepEqual(text, { type: 'text', text: 'What is it?' });
      assert.equal(await count(page, '.bubble img'), 1);
    }));
});

describe('pictures', () => {
  /** Offers a picture of the question set to the page as a person would: `drop` or `paste`. */
  const offer = (page, name, by) => {
    const file = new URL(`../../models/demo/eval/images/${name}`, import.meta.url);
    const base64 = readFileSync(file).toString('base64');
    return page.evaluate(
      ([name, base64, by]) => {
        const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
        const data = new DataTransfer();
        data.items.add(new File([bytes], name, { type: 'image/png' }));
        const options = { bubbles: true, cancelable: true };
        const event =
          by === 'drop'
            ? new DragEvent('drop', { dataTransfer: data, ...options })
            : new ClipboardEvent('paste', { clipboardData: data, ...options });
        document.querySelector('#prompt').dispatchEvent(event);
      },
      [name, base64, by],
    );
  };

  test('dropped and pasted ones are shown and answered by the model', () =>
    onPage(async (page) => {
      await ready(page);
      await setting(page, { thinking: 'off' });
      await offer(page, 'dev-280-0.png', 'drop');
      await page.waitForSelector('.thumb img');
      const drawn = () =>
        page.locator('.thumb img').evaluate((image) => image.complete && image.naturalWidth > 0);
      assert.equal(await drawn(), true, 'the thumbnail shows the picture');
      assert.match(await chat(page, 'What is in the picture, and how many?'), /There are 6 green crosses\./);
      assert.equal(await count(page, '.thumb'), 0, 'the composer is empty again');
      assert.equal(await count(page, '.bubble img'), 1);
      await page.keyboard.press('Alt+KeyN');
      await offer(page, 'dev-248-0.png', 'paste');
      await page.waitForSelector('.thumb img');
      assert.match(await chat(page, 'Which digit is in the picture?'), /The digit is 5\./);
      await offer(page, 'dev-280-0.png', 'drop');
      await page.waitForSelector('.thumb img');
      await page.fill('#prompt', 'What is in the picture, and how many?');
      await page.screenshot({ path: `${SHOTS}/pictures.png` });
      await page.reload();
      await ready(page);
      assert.equal(await count(page, '.bubble img'), 1, 'a picture is kept with its conversation');
    }));
});

describe('what can go wrong', () => {
  const status = /Failed to load resource/;

  test('a refusal says what to do, and leads to the setting', () =>
    onPage(
      async (page) => {
        await ready(page);
        await page.evaluate(() =>
          localStorage.setItem('clary.settings', JSON.stringify({ top_k: '99999999' })),
        );
        await page.reload();
        await ready(page);
        await send(page, 'Hello');
        const failure = page.locator('.failure');
        assert.match(await failure.innerText(), /refused the request[\s\S]*top_k/);
        await failure.getByText('Open settings').click();
        assert.equal(await page.evaluate(() => document.activeElement.id), 'setting-top_k');
        await page.fill('#setting-top_k', '');
        await page.click('#save-settings');
        await failure.getByText('Try again').click();
        await page.waitForSelector('.reply:not(.running) .numbers');
        assert.equal(await count(page, '.failure'), 0);
      },
      { allowed: status },
    ));

  test('a server that goes away and comes back', async () => {
    const first = await serve(['--slots', '1', '--ctx', '2048']);
    let second = null;
    try {
      await onPage(
        async (page) => {
          await ready(page);
          await first.stop();
          await send(page, 'What is 37 + 58?');
          assert.match(await page.locator('.failure').innerText(), /does not answer/);
          await page.waitForSelector('.state[data-state=away]');
          second = await serve(['--slots', '1', '--ctx', '2048'], { port: first.port, wait: false });
          await ready(page);
          await page.locator('.failure').getByText('Try again').click();
          await page.waitForSelector('.reply:not(.running) .numbers');
          assert.match(await lastReply(page), /95/);
        },
        { url: first.url, allowed: status },
      );
    } finally {
      await second?.stop();
    }
  });

  test('a server that wants a key', async () => {
    const keyed = await serve(['--slots', '1', '--ctx', '2048'], { env: { CLARY_API_KEY: 'k-1' } });
    try {
      await onPage(
        async (page) => {
          await page.waitForSelector('#key-input');
          await page.fill('#key-input', 'wrong');
          await page.click('#use-key');
          await page.waitForSelector('text=The last key was not accepted');
          await page.fill('#key-input', 'k-1');
          await page.click('#use-key');
          await ready(page);
          assert.equal(await page.locator('#notice').isVisible(), false);
          assert.match(await chat(page, 'What is 37 + 58?'), /95/);
          await page.reload();
          await ready(page);
        },
        { url: keyed.url, allowed: status },
      );
    } finally {
      await keyed.stop();
    }
  });
});
