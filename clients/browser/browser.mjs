// A headless Chromium whose every complaint is kept.

import { existsSync } from 'node:fs';

import { chromium } from 'playwright-core';

const PLACES = ['/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome'];
// A container has no user namespaces and no GPU; nothing may be fetched from outside.
const FLAGS = [
  '--no-sandbox',
  '--disable-gpu',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
];

/** The browser: `CHROMIUM`, or the one that Debian installs. */
export function launch() {
  const executablePath = process.env.CHROMIUM ?? PLACES.find(existsSync);
  if (!executablePath) throw new Error('no Chromium found; install it, or set CHROMIUM to its path');
  return chromium.launch({ executablePath, args: FLAGS });
}

/**
 * A page of a fresh profile. `complaints` gets every console error and warning, every fault of a script and
 * every violation of the content policy; `outside` every request that goes to another origin.
 */
export async function openPage(browser, url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1180, height: 800 }, ...options });
  await context.addInitScript(() => {
    document.addEventListener('securitypolicyviolation', (event) => {
      console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`);
    });
  });
  const page = await context.newPage();
  const complaints = [];
  const outside = [];
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type())) complaints.push(message.text());
  });
  page.on('pageerror', (error) => complaints.push(`fault: ${error.stack}`));
  page.on('request', (request) => {
    const target = request.url();
    if (!target.startsWith(url) && !/^(data|blob):/.test(target)) outside.push(target);
  });
  page.setDefaultTimeout(20_000);
  await page.goto(url);
  return { page, context, complaints, outside };
}
