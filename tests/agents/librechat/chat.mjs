// LibreChat without its server and its database: a message, and the work for it, through the package with which the
// server makes its requests. SETTINGS is what `warmturn connect librechat` writes, CONVERSATION a file that this
// program keeps. node chat.mjs SETTINGS CONVERSATION TEXT
import { execSync } from 'node:child_process';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const require = createRequire(new URL('../../../.agents/librechat/', import.meta.url));
const { tool } = require('@langchain/core/tools');
const agents = require('@librechat/agents');
const { GraphEvents, Providers, Run } = agents;

const [settings, file, text] = process.argv.slice(2);
const endpoint = require('yaml').parse(readFileSync(settings, 'utf8')).endpoints.custom[0];
const conversation = existsSync(file)
  ? JSON.parse(readFileSync(file, 'utf8'))
  : { id: crypto.randomUUID(), messages: [] };
const isNew = conversation.messages.length === 0;
conversation.messages.push({ role: 'user', content: text });

const headers = Object.fromEntries(
  Object.entries(endpoint.headers).map(([name, value]) => [
    name,
    value.replace('{{LIBRECHAT_BODY_CONVERSATIONID}}', conversation.id),
  ]),
);
const client = {
  model: endpoint.models.default[0],
  apiKey: endpoint.apiKey,
  user: '000000000000000000000001',
  configuration: { baseURL: endpoint.baseURL, defaultHeaders: headers },
};

const word = { type: 'string' };
const define = (name, fields, run) =>
  tool(async (given) => run(given), {
    name,
    description: `${name} of the project`,
    schema: { type: 'object', properties: fields, required: Object.keys(fields) },
  });
const tools = [
  define('write_file', { path: word, text: word }, (given) => {
    writeFileSync(given.path, given.text);
    return `written: ${given.text}`;
  }),
  define('read_file', { path: word }, (given) => readFileSync(given.path, 'utf8')),
  define('shell', { command: word }, (given) => execSync(given.command, { encoding: 'utf8' })),
];

const { contentParts, aggregateContent } = agents.createContentAggregator();
const collected = [
  GraphEvents.ON_RUN_STEP,
  GraphEvents.ON_RUN_STEP_DELTA,
  GraphEvents.ON_RUN_STEP_COMPLETED,
  GraphEvents.ON_MESSAGE_DELTA,
  GraphEvents.ON_REASONING_DELTA,
];
const customHandlers = {
  [GraphEvents.TOOL_END]: new agents.ToolEndHandler(),
  [GraphEvents.CHAT_MODEL_END]: new agents.ModelEndHandler(),
  [GraphEvents.CHAT_MODEL_STREAM]: new agents.ChatModelStreamHandler(),
};
for (const event of collected) {
  customHandlers[event] = { handle: (_, data) => aggregateContent({ event, data }) };
}
const run = await Run.create({
  runId: crypto.randomUUID(),
  graphConfig: {
    type: 'standard',
    llmConfig: { provider: Providers.OPENAI, streaming: true, streamUsage: true, ...client },
    tools,
    instructions: 'You work on the files of a project. '.repeat(40),
  },
  returnContent: true,
  customHandlers,
});

const stopped = new AbortController();
process.on('SIGINT', () => stopped.abort());
const { messages } = agents.formatAgentMessages(
  conversation.messages,
  undefined,
  new Set(tools.map((one) => one.name)),
);
try {
  await run.processStream(
    { messages },
    {
      configurable: { thread_id: conversation.id },
      streamMode: 'values',
      version: 'v2',
      signal: stopped.signal,
    },
  );
} catch (error) {
  if (!stopped.signal.aborted) throw error;
}
conversation.messages.push({ role: 'assistant', content: contentParts.filter(Boolean) });
if (isNew) {
  await run.generateTitle({
    provider: Providers.OPENAI,
    inputText: text,
    contentParts,
    titleMethod: 'completion',
    clientOptions: { streaming: false, ...client },
  });
}
writeFileSync(file, JSON.stringify(conversation));
console.log(contentParts.map((part) => part?.text ?? '').join('\n'));
process.exit(0);
