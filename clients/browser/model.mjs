// Replies that a test needs word for word, in the server's own form, instead of those of the model.

/** One data line of a stream. */
function line(value) {
  return `data: ${JSON.stringify(value)}\n\n`;
}

function chunk(delta, finish = null) {
  return line({ choices: [{ index: 0, delta, finish_reason: finish }] });
}

/** The stream of a reply with this text. */
export function replyOf(text) {
  const chunks = [chunk({ role: 'assistant', content: '' }), chunk({ content: text }), chunk({}, 'stop')];
  return `${chunks.join('')}data: [DONE]\n\n`;
}

/** Answers the page's next chats with a text. Resolves to the list of request bodies, which grows. */
export async function say(page, text) {
  const bodies = [];
  await page.route('**/v1/chat/completions', (route) => {
    bodies.push(route.request().postDataJSON());
    return route.fulfill({ contentType: 'text/event-stream', body: replyOf(text) });
  });
  return bodies;
}
