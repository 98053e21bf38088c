//! `clary template`: the prompt that a chat becomes. Reads the text files of a model folder, no weights.

mod lint;

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Map, Value, json};
use server::TextSide;
use text::{History, LateSystem, Message, RenderOptions, Rendered, Specials, Tool};

use crate::args::OnOff;
use crate::error::{Exit, Failure, Result};
use crate::input;
use crate::origin::Origin;
use crate::output::Output;
use crate::settings::{self, LateSystemArg};
use crate::table::Table;

/// `template`.
#[derive(Debug, Args)]
pub(crate) struct TemplateArgs {
    /// Folder; its tokenizer and template are read, no weights
    pub(crate) model: String,
    /// JSON: messages, or a chat request with messages, tools and chat_template_kwargs; - for stdin
    /// [default: one question]
    pub(crate) file: Option<PathBuf>,
    /// Render the built-in chats of every kind and say which fail
    #[arg(long, conflicts_with_all = ["file", "tokens"])]
    pub(crate) lint: bool,
    /// List the tokens in place of the text
    #[arg(long)]
    pub(crate) tokens: bool,
    /// Whether the model thinks before it answers [default: on]
    #[arg(long, value_enum, env = "CLARY_THINKING")]
    pub(crate) thinking: Option<OnOff>,
    #[command(flatten)]
    pub(crate) late_system: LateSystemArg,
}

/// Largest chat, bytes: a request's body may be as long.
const CHAT_MAX: u64 = 64 << 20;
/// The chat where none is given.
const QUESTION: &str = r#"[{"role": "user", "content": "What is 37 + 58?"}]"#;

/// Prints a prompt, its tokens, or what the built-in chats become.
pub(crate) fn template(args: &TemplateArgs, output: &Output) -> Result {
    let dir = match Origin::parse(&args.model)? {
        Origin::Folder(dir) | Origin::Stored(dir, _) => dir,
        Origin::Synth(spec) => spec.config.with_file_name(""),
    };
    let text = TextSide::open(if dir.as_os_str().is_empty() { Path::new(".") } else { &dir })?;
    if args.lint {
        return lint::lint(&text, output);
    }
    let chat = match &args.file {
        Some(path) => serde_json::from_str(&input::text_or_stdin(path, CHAT_MAX)?)
            .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?,
        None => serde_json::from_str(QUESTION).expect("it is JSON"),
    };
    let thinking = args.thinking.map(|thinking| thinking == OnOff::On);
    let rendered = render(&text, chat, thinking, args.late_system.rule())?;
    if output.json {
        let notes: Vec<String> = rendered.notes.iter().map(ToString::to_string).collect();
        return Ok(output.document(&json!({
            "prompt": rendered.text,
            "prompt_token_ids": rendered.ids,
            "count": rendered.ids.len(),
            "thinking": rendered.in_reasoning,
            "template_sha256": text.template.digest(),
            "notes": notes,
        }))?);
    }
    match args.tokens {
        true => output.out(&tokens(&text, &rendered))?,
        false => output.out(&format!("{}\n", rendered.text))?,
    }
    for note in &rendered.notes {
        output.note(&format!("note: {note}"))?;
    }
    let opens = if rendered.in_reasoning { "the reply begins with reasoning" } else { "no reasoning" };
    Ok(output.note(&format!("{} tokens; {opens}", rendered.ids.len()))?)
}

/// Renders an array of messages, or a request with `messages`, `tools` and `chat_template_kwargs`.
pub(super) fn render(
    text: &TextSide,
    chat: Value,
    thinking: Option<bool>,
    late_system: LateSystem,
) -> Result<Rendered> {
    let mut request = match chat {
        Value::Object(map) => map,
        messages => Map::from_iter([("messages".to_owned(), messages)]),
    };
    let messages = request.remove("messages").ok_or_else(|| {
        Failure::usage("no messages: an array of them is expected, or an object with `messages`")
    })?;
    let tools = Tool::parse_all(&request.remove("tools").unwrap_or_else(|| json!([])))?;
    let kwargs = request.remove("chat_template_kwargs").unwrap_or_else(|| json!({}));
    let mut kwargs = settings::kwargs(&kwargs.to_string())?;
    let flag = |value: Option<Value>| value.and_then(|value| value.as_bool());
    let in_kwargs = flag(kwargs.remove("enable_thinking"));
    let preserve_thinking = flag(kwargs.remove("preserve_thinking"));
    let history = History::new(Message::parse_all(&messages)?, late_system)?;
    let options = RenderOptions {
        tools,
        enable_thinking: Some(thinking.or(in_kwargs).unwrap_or(true)),
        preserve_thinking,
        template_kwargs: kwargs,
        ..RenderOptions::default()
    };
    Ok(text.template.render(&text.tokenizer, &history, &options)?)
}

/// One token a line: position, id, text, and whether it is a control token.
fn tokens(text: &TextSide, rendered: &Rendered) -> String {
    let mut table = Table::new(">><<");
    for (at, &id) in rendered.ids.iter().enumerate() {
        let piece = format!("{:?}", text.tokenizer.decode(&[id], Specials::Keep));
        let control = if text.tokenizer.control_content(id).is_some() { "control" } else { "" };
        table.row([&at.to_string(), &id.to_string(), &piece, control]);
    }
    table.text()
}

/// A template that fails a chat it should take.
pub(super) fn failed(count: usize, of: usize) -> Failure {
    Failure::new(Exit::Model, format!("{count} of {of} chats fail with this template"))
        .hint("compare chat_template.jinja with the place the model came from")
}
