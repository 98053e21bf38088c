//! Known clients: what to write where. `{url}`, `{model}`, `{context}`, `{output}`, `{key}`, `{env_key}` and,
//! where the client asks whether the model sees, `{sees}` and `{modalities}` are filled in.

use super::dialects::Dialect;

/// A program that talks to servers.
pub(super) struct Known {
    /// Its name on the command line.
    pub(super) name: &'static str,
    /// What it is.
    pub(super) about: &'static str,
    /// What it speaks.
    pub(super) dialect: Dialect,
    /// Where the settings go.
    pub(super) place: &'static str,
    /// The settings.
    pub(super) settings: &'static str,
}

pub(super) const CLIENTS: [Known; 14] = [
    Known {
        name: "claude-code",
        about: "Claude Code",
        dialect: Dialect::Messages,
        place: "in the shell that starts it",
        settings: r#"export ANTHROPIC_BASE_URL="{url}"
export ANTHROPIC_AUTH_TOKEN="{key}"
export ANTHROPIC_MODEL="{model}"
export ANTHROPIC_SMALL_FAST_MODEL="{model}"
export ANTHROPIC_DEFAULT_HAIKU_MODEL="{model}"
export CLAUDE_CODE_MAX_CONTEXT_TOKENS={context}
export CLAUDE_CODE_MAX_OUTPUT_TOKENS={output}
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude"#,
    },
    Known {
        name: "codex",
        about: "Codex CLI",
        dialect: Dialect::Responses,
        place: "in ~/.codex/config.toml",
        settings: r#"model = "{model}"
model_provider = "clary"
model_context_window = {context}

[model_providers.clary]
name = "Clary"
base_url = "{url}/v1"
wire_api = "responses"{env_key}"#,
    },
    Known {
        name: "opencode",
        about: "opencode",
        dialect: Dialect::Chat,
        place: "in opencode.json",
        settings: r#"{
  "$schema": "https://opencode.ai/config.json",
  "provider": {
    "clary": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "Clary",
      "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
      "models": {
        "{model}": {
          "name": "{model}", "tool_call": true, "reasoning": true, "attachment": {sees},
          "modalities": {"input": [{modalities}], "output": ["text"]},
          "limit": {"context": {context}, "output": {output}}
        }
      }
    }
  },
  "model": "clary/{model}"
}"#,
    },
    Known {
        name: "aider",
        about: "aider",
        dialect: Dialect::Chat,
        place: "in the shell that starts it, in the folder it works in",
        settings: r#"export OPENAI_API_BASE="{url}/v1"
export OPENAI_API_KEY="{key}"
cat > .aider.model.metadata.json <<'END'
{"openai/{model}": {"litellm_provider": "openai", "mode": "chat", "supports_vision": {sees},
  "max_tokens": {output}, "max_input_tokens": {context}, "max_output_tokens": {output},
  "input_cost_per_token": 0, "output_cost_per_token": 0}}
END
aider --model "openai/{model}""#,
    },
    Known {
        name: "cline",
        about: "Cline and Roo Code",
        dialect: Dialect::Chat,
        place: "in the extension's settings",
        settings: r#"API Provider      OpenAI Compatible
Base URL          {url}/v1
API Key           {key}
Model ID          {model}
Context Window    {context}
Supports Images   {sees}"#,
    },
    Known {
        name: "continue",
        about: "Continue",
        dialect: Dialect::Chat,
        place: "in ~/.continue/config.yaml",
        settings: r#"name: clary
version: 0.0.1
schema: v1
models:
  - name: {model}
    provider: openai
    model: {model}
    apiBase: {url}/v1
    apiKey: {key}
    roles: [chat, edit, apply]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: {context}"#,
    },
    Known {
        name: "zed",
        about: "Zed",
        dialect: Dialect::Chat,
        place: "in settings.json; the key goes into the agent panel",
        settings: r#"{
  "language_models": {
    "openai_compatible": {
      "Clary": {
        "api_url": "{url}/v1",
        "available_models": [
          {"name": "{model}", "max_tokens": {context}, "capabilities": {"tools": true, "images": {sees}}}
        ]
      }
    }
  }
}"#,
    },
    Known {
        name: "open-webui",
        about: "Open WebUI",
        dialect: Dialect::Chat,
        place: "in the shell that starts it",
        settings: r#"export OPENAI_API_BASE_URL="{url}/v1"
export OPENAI_API_KEY="{key}"
open-webui serve"#,
    },
    Known {
        name: "litellm",
        about: "LiteLLM proxy",
        dialect: Dialect::Chat,
        place: "in config.yaml",
        settings: r#"model_list:
  - model_name: {model}
    litellm_params:
      model: hosted_vllm/{model}
      api_base: {url}/v1
      api_key: {key}"#,
    },
    Known {
        name: "openai-python",
        about: "OpenAI's Python package",
        dialect: Dialect::Chat,
        place: "in a program",
        settings: r#"from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
reply = client.chat.completions.create(
    model="{model}", messages=[{"role": "user", "content": "What is 37 + 58?"}])
print(reply.choices[0].message.content)"#,
    },
    Known {
        name: "openai-node",
        about: "OpenAI's JavaScript package",
        dialect: Dialect::Chat,
        place: "in a program",
        settings: r#"import OpenAI from "openai";

const client = new OpenAI({ baseURL: "{url}/v1", apiKey: "{key}" });
const reply = await client.chat.completions.create({
  model: "{model}", messages: [{ role: "user", content: "What is 37 + 58?" }] });
console.log(reply.choices[0].message.content);"#,
    },
    Known {
        name: "anthropic-python",
        about: "Anthropic's Python package",
        dialect: Dialect::Messages,
        place: "in a program",
        settings: r#"from anthropic import Anthropic

client = Anthropic(base_url="{url}", api_key="{key}")
reply = client.messages.create(
    model="{model}", max_tokens=1000, messages=[{"role": "user", "content": "What is 37 + 58?"}])
print(reply.content)"#,
    },
    Known {
        name: "ollama",
        about: "programs made for Ollama",
        dialect: Dialect::Ollama,
        place: "in the shell that starts them",
        settings: r#"export OLLAMA_HOST="{url}""#,
    },
    Known {
        name: "curl",
        about: "curl",
        dialect: Dialect::Chat,
        place: "in a shell",
        settings: r#"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \
  -H 'Authorization: Bearer {key}' \
  -d '{"model": "{model}", "messages": [{"role": "user", "content": "What is 37 + 58?"}]}'"#,
    },
];
