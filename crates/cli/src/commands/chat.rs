//! `clary chat`: a chat in the terminal, or over a pipe.

use std::io::{BufRead, IsTerminal, Stdin, stdin};
use std::path::Path;

use engine::Sampling;
use rustyline::error::ReadlineError;
use server::{Conversation, Finish, Outcome};
use text::{Content, Message, Part, Role};

use crate::args::ChatArgs;
use crate::error::{Exit, Failure, Result};
use crate::interrupt::Interrupt;
use crate::load::Sizes;
use crate::output::Output;
use crate::session::{self, Running};
use crate::settings::{self, Thinking};
use crate::{mistakes, reply, transcript, vision};

/// What can be typed at the prompt.
pub(crate) const HELP: &str = "\
/think on|off    whether the model thinks before it answers
/image FILE      show a picture with the next message
/system TEXT     instructions put before the chat; without TEXT: none
/save FILE       write the chat to a file
/load FILE       read a chat from a file
/retry           answer the last message again
/undo            take back the last message and its answer
/stats           numbers of the last reply
/help            this list
/quit            end (also Ctrl-D)
Ctrl-C stops a reply; at the prompt it ends the chat.
";

/// Reads lines until there are no more.
pub(crate) fn chat(ChatArgs { reply: args }: &ChatArgs, output: &Output) -> Result {
    if output.json {
        return Err(
            Failure::usage("chat has no --json form").hint("`clary run --json` gives one reply as JSON")
        );
    }
    let thinking = Thinking::new(&args.model)?;
    // The line editor takes Ctrl-C for itself as long as it lives, so it must come first.
    let mut lines = Lines::new(output)?;
    let interrupt = Interrupt::install()?;
    let sizes = Sizes::chat(args.model.ctx, args.draft.draft);
    let running = session::start(args, sizes, output)?;
    let mut chat = Chat {
        sampling: settings::sampling(&args.sampling, &running.session.text().defaults),
        max_tokens: args.sampling.max_tokens,
        draft: sizes.draft,
        running,
        output,
        interrupt,
        thinking,
        conversation: Conversation::default(),
        pictures: Vec::new(),
        last: None,
        replies: 0,
    };
    chat.system(args.system.as_deref().unwrap_or_default());
    if lines.is_terminal() {
        output.note("/help lists commands; Ctrl-D ends")?;
    }
    let mut mistakes = 0;
    while let Some(line) = lines.next()? {
        match chat.line(&line) {
            Ok(Next::Go) => {}
            Ok(Next::Quit) => break,
            Err(failure) if lines.is_terminal() && !failure.is_broken_pipe => {
                output.failure(&failure)?;
            }
            // A script goes on after a command that means nothing, and learns of it at the end. It does not
            // after a failure that would give its next lines another meaning.
            Err(failure) if is_harmless(&line, failure.exit) && !failure.is_broken_pipe => {
                output.failure(&failure)?;
                mistakes += 1;
            }
            Err(failure) => return Err(failure),
        }
    }
    match mistakes {
        0 => Ok(()),
        1 => Err(Failure::usage("a command of this chat was not obeyed").hint("/help lists the commands")),
        count => Err(Failure::usage(format!("{count} commands of this chat were not obeyed"))
            .hint("/help lists the commands")),
    }
}

/// Whether a line is a command whose failure changes nothing for the lines after it: a chat that could not be
/// loaded would give them another meaning, and a device that failed gives no more replies.
fn is_harmless(line: &str, exit: Exit) -> bool {
    let command = line.split_whitespace().next().unwrap_or_default();
    command == "/save" || exit == Exit::Usage && command.starts_with('/') && command != "/load"
}

/// Where lines come from.
enum Lines {
    Terminal(Box<rustyline::DefaultEditor>),
    Pipe(Stdin),
}

impl Lines {
    fn new(output: &Output) -> Result<Self> {
        if !stdin().is_terminal() {
            return Ok(Self::Pipe(stdin()));
        }
        match rustyline::DefaultEditor::new() {
            Ok(editor) => Ok(Self::Terminal(Box::new(editor))),
            Err(error) => {
                output.note(&format!("note: no line editing: {error}"))?;
                Ok(Self::Pipe(stdin()))
            }
        }
    }

    fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// The next line; `None` at the end or after Ctrl-C at the prompt.
    fn next(&mut self) -> Result<Option<String>> {
        match self {
            Self::Terminal(editor) => match editor.readline("> ") {
                Ok(line) => {
                    // A line that is not remembered can still be answered.
                    let _ = editor.add_history_entry(line.as_str());
                    Ok(Some(line))
                }
                Err(ReadlineError::Eof | ReadlineError::Interrupted) => Ok(None),
                Err(error) => Err(Failure::new(Exit::Failure, format!("the terminal: {error}"))),
            },
            Self::Pipe(stdin) => {
                let mut line = String::new();
                let read = stdin.lock().read_line(&mut line);
                let read = read.map_err(|error| Failure::usage(format!("stdin: {error}")))?;
                Ok((read > 0).then(|| line.trim_end_matches(['\n', '\r']).to_owned()))
            }
        }
    }
}

/// Whether another line is read.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Go,
    Quit,
}

struct Chat<'a> {
    running: Running,
    output: &'a Output,
    interrupt: Interrupt,
    thinking: Thinking,
    sampling: Sampling,
    max_tokens: Option<usize>,
    draft: crate::args::Draft,
    conversation: Conversation,
    /// Pictures of the next message.
    pictures: Vec<Part>,
    last: Option<Outcome>,
    /// Names replies, for the ids of their tool calls.
    replies: usize,
}

impl Chat<'_> {
    /// Obeys a command or answers a message.
    fn line(&mut self, line: &str) -> Result<Next> {
        if line.trim().is_empty() {
            return Ok(Next::Go);
        }
        let Some(command) = line.trim().strip_prefix('/') else {
            let mut parts = std::mem::take(&mut self.pictures);
            let content = match parts.is_empty() {
                true => Content::Text(line.to_owned()),
                false => {
                    parts.push(Part::Text(line.to_owned()));
                    Content::Parts(parts)
                }
            };
            self.conversation.messages.push(Message { content, ..Message::text(Role::User, "") });
            self.answer()?;
            return Ok(Next::Go);
        };
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        self.command(name, rest.trim()).map_err(|failure| failure.or_hint("/help lists the commands"))
    }

    fn command(&mut self, name: &str, rest: &str) -> Result<Next> {
        match name {
            "think" => match rest {
                "on" | "off" => self.thinking.enabled = rest == "on",
                _ => return Err(Failure::usage("/think takes on or off")),
            },
            "image" => {
                if self.running.session.vision().is_none() {
                    return Err(Failure::usage("/image: this model takes no pictures as it is loaded"));
                }
                self.pictures.push(vision::part(file(name, rest)?)?);
                self.output.note("the picture goes with the next message")?;
            }
            "system" => self.system(rest),
            "save" => {
                let path = file(name, rest)?;
                // A file without messages could not be loaded.
                if self.conversation.messages.is_empty() {
                    return Err(Failure::usage("/save: there is no message yet"));
                }
                transcript::save(path, &self.conversation)?;
                self.output.note(&format!("{} messages saved", self.conversation.messages.len()))?;
            }
            "load" => {
                self.conversation = transcript::load(file(name, rest)?)?;
                self.last = None;
                self.output.note(&format!("{} messages loaded", self.conversation.messages.len()))?;
            }
            "retry" => {
                let kept = self.conversation.messages.iter().rposition(|message| message.role == Role::User);
                let Some(kept) = kept else { return Err(Failure::usage("/retry: there is no message yet")) };
                self.conversation.messages.truncate(kept + 1);
                self.answer()?;
            }
            "undo" => {
                let last = self.conversation.messages.iter().rposition(|message| message.role == Role::User);
                let Some(last) = last else { return Err(Failure::usage("/undo: there is no message yet")) };
                self.conversation.messages.truncate(last);
                self.last = None;
            }
            "stats" => match &self.last {
                Some(outcome) => self.output.err(&format!("{}\n", reply::statistics(outcome)))?,
                None => return Err(Failure::usage("/stats: there is no reply yet")),
            },
            "help" => self.output.err(HELP)?,
            "quit" | "exit" => return Ok(Next::Quit),
            _ => {
                let known = HELP.lines().filter_map(|line| line.strip_prefix('/')?.split_whitespace().next());
                let near = mistakes::nearest(name, known).replace("mean ", "mean /");
                return Err(Failure::usage(format!("/{name} is no command{near}")).hint("/help lists them"));
            }
        }
        Ok(Next::Go)
    }

    /// Replaces the leading system message.
    fn system(&mut self, text: &str) {
        let messages = &mut self.conversation.messages;
        if messages.first().is_some_and(|message| message.role == Role::System) {
            messages.remove(0);
        }
        if !text.is_empty() {
            messages.insert(0, Message::text(Role::System, text));
        }
    }

    /// Answers the last message. A message that cannot be answered is taken back.
    fn answer(&mut self) -> Result {
        let wish = settings::Wish {
            thinking: &self.thinking,
            sampling: self.sampling.clone(),
            max_tokens: self.max_tokens,
            draft: self.draft,
        };
        let options = settings::options(wish);
        let stream = self.running.session.start(self.conversation.clone(), &options);
        let outcome = stream
            .map_err(Failure::from)
            .and_then(|stream| reply::show(stream, self.output, &self.interrupt));
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(failure) => {
                self.conversation.messages.pop();
                return Err(failure);
            }
        };
        self.output.note(&self.output.dim(&reply::statistics(&outcome)))?;
        self.replies += 1;
        let message = outcome.message(&format!("reply {}", self.replies));
        let is_empty = message.content == Content::Text(String::new());
        // Without content or calls there is nothing that a later prompt could show.
        if !is_empty || message.reasoning.is_some() || !message.tool_calls.is_empty() {
            self.conversation.messages.push(message);
        }
        if outcome.finish == Finish::Cancelled {
            self.output.note("stopped; /retry answers again, /undo takes the message back")?;
        }
        self.last = Some(outcome);
        Ok(())
    }
}

fn file<'a>(command: &str, rest: &'a str) -> Result<&'a Path> {
    if rest.is_empty() {
        return Err(Failure::usage(format!("/{command} needs a file name")));
    }
    Ok(Path::new(rest))
}
