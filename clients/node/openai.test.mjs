// The `openai` package for JavaScript against the server at CLARY_URL, which runs
// `--thinking off --temperature 0`.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import OpenAI from 'openai';

const client = new OpenAI({ baseURL: `${process.env.CLARY_URL}/v1`, apiKey: 'none', maxRetries: 0 });
const model = 'demo';
const messages = [{ role: 'user', content: 'What is 37 + 58?' }];
const asksTime = [{ role: 'user', content: 'Tell me the local time in Prague.' }];
const getTime = {
  name: 'get_time',
  description: 'Get the local time of a city',
  parameters: {
    type: 'object',
    properties: { city: { type: 'string', description: 'The city' } },
    required: ['city'],
  },
};
const tools = [{ type: 'function', function: getTime }];

test('chat, whole and streamed, are one', async () => {
  const whole = await client.chat.completions.create({ model, messages });
  assert.match(whole.choices[0].message.content, /95/);
  const stream = await client.chat.completions.create({
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = '';
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? '';
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test('a stream that is left early leaves the server free', async () => {
  const stream = await client.chat.completions.create({ model, messages, stream: true, ignore_eos: true });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  const slots = await (await fetch(`${process.env.CLARY_URL}/slots`)).json();
  assert.ok(slots.length > 0);
  assert.match((await client.chat.completions.create({ model, messages })).choices[0].message.content, /95/);
});

test('tools, streamed, there and back', async () => {
  const runner = client.chat.completions.stream({ model, messages: asksTime, tools });
  const message = await runner.finalMessage();
  const [call] = message.tool_calls;
  assert.deepEqual(JSON.parse(call.function.arguments), { city: 'Prague' });
  const answer = await client.chat.completions.create({
    model,
    tools,
    messages: [...asksTime, message, { role: 'tool', tool_call_id: call.id, content: '{"time": "22:48"}' }],
  });
  assert.match(answer.choices[0].message.content, /22:48/);
});

test('the package runs a tool by itself', async () => {
  const calls = [];
  const run = client.chat.completions.runTools({
    model,
    messages: asksTime,
    tools: [
      {
        type: 'function',
        function: {
          ...getTime,
          parse: JSON.parse,
          function: (args) => {
            calls.push(args);
            return '{"time": "22:48"}';
          },
        },
      },
    ],
  });
  assert.match(await run.finalContent(), /22:48/);
  assert.deepEqual(calls, [{ city: 'Prague' }]);
});

test('json_schema', async () => {
  const schema = {
    type: 'object',
    properties: { sum: { type: 'integer' } },
    required: ['sum'],
    additionalProperties: false,
  };
  const reply = await client.chat.completions.create({
    model,
    messages,
    response_format: { type: 'json_schema', json_schema: { name: 'sum', schema, strict: true } },
  });
  assert.equal(typeof JSON.parse(reply.choices[0].message.content).sum, 'number');
});

test('responses, whole and streamed, are one', async () => {
  const whole = await client.responses.create({ model, input: 'What is 37 + 58?' });
  assert.match(whole.output_text, /95/);
  const stream = client.responses.stream({ model, input: 'What is 37 + 58?' });
  const kinds = [];
  for await (const event of stream) kinds.push(event.type);
  assert.equal(kinds[0], 'response.created');
  assert.equal(kinds.at(-1), 'response.completed');
  assert.equal((await stream.finalResponse()).output_text, whole.output_text);
});

test('errors have their classes', async () => {
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.deepEqual([error.param, error.code], ['temperature', 'invalid_value']);
    return true;
  });
  await assert.rejects(client.models.retrieve('none'), OpenAI.NotFoundError);
});
