//! What can be typed.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::commands::again::{BundleArgs, ReplayArgs, VerifyArgs};
use crate::commands::config::ConfigAction;
use crate::commands::connect::ConnectArgs;
use crate::commands::doctor::DoctorArgs;
use crate::commands::image::ImageArgs;
use crate::commands::pull::PullArgs;
use crate::commands::serve::ServeArgs;
use crate::commands::soak::SoakArgs;
use crate::commands::stored::{ListArgs, RmArgs};
use crate::commands::template::TemplateArgs;
use crate::commands::top::TopArgs;
use crate::vision::VisionArgs;

/// Inference for the Qwen3.5-MoE family.
///
/// A MODEL is a folder with config.json and safetensors files, a name `owner/name[@revision]` that `pull`
/// has fetched, or
/// `synth:CONFIG.json?scheme=S&layers=N&experts=N&seed=S`: random weights made in memory.
///
/// Exit codes: 0 done, 1 failure, 2 usage, 3 model missing or refused, 4 does not fit memory,
/// 5 device or driver, 6 network, 7 mismatch found, 8 too few right (eval), 130 interrupted.
#[derive(Debug, Parser)]
#[command(name = "clary", version, propagate_version = false)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, Args)]
pub(crate) struct Global {
    /// Configuration file in place of the user's own
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// No progress, reasoning, statistics or notes on stderr
    #[arg(long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// More on stderr; twice for more still
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Colors and dimmed text
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto)]
    pub(crate) color: Color,
    /// One JSON document on stdout
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// When to color.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Fetch a model from a hub into the store; a second run goes on where the first ended
    Pull(PullArgs),
    /// The models in the store
    List(ListArgs),
    /// Remove a model from the store
    Rm(RmArgs),
    /// What a model is, what it needs and what can run it
    Info(InfoArgs),
    /// Check every shape, width and value of a model without running it
    Check(CheckArgs),
    /// One reply: the answer to stdout, reasoning and statistics to stderr
    Run(RunArgs),
    /// Chat in the terminal
    Chat(ChatArgs),
    /// The server: OpenAI's, Anthropic's and Ollama's routes on one port
    Serve(Box<ServeArgs>),
    /// Run the request of a receipt again, plainly, and compare
    Verify(VerifyArgs),
    /// Run a recorded request again, plainly, and compare
    Replay(ReplayArgs),
    /// Take a recorded request out of the folder of `serve --record`
    Bundle(BundleArgs),
    /// Teacher-forced scores of token ids
    Logits(LogitsArgs),
    /// What the model sees of a picture: size, grid, tokens
    Image(ImageArgs),
    /// Write a random checkpoint that loads
    Synth(SynthArgs),
    /// Measure prefill and decode
    Bench(BenchArgs),
    /// A long mixed load on a server, with clients that leave
    Soak(SoakArgs),
    /// Built-in evaluations
    Eval {
        /// Which one
        #[command(subcommand)]
        eval: Eval,
    },
    /// The prompt that a chat becomes, and its tokens
    Template(TemplateArgs),
    /// Whether this machine can run models, and what to mend
    Doctor(DoctorArgs),
    /// Settings for a known client, and whether it would work with a running server
    Connect(ConnectArgs),
    /// What a running server is doing: slots, queue, rates, acceptance, cache, memory
    Top(TopArgs),
    /// Settings of `serve`: what counts, and where it comes from
    Config {
        /// What to do
        #[command(subcommand)]
        action: ConfigAction,
    },
    /// Print a completion script for a shell
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Print the manual page, or write one page per command into a folder
    Man {
        /// The folder
        dir: Option<PathBuf>,
    },
    /// Version, commit, target and instruction set
    Version,
}

/// How to run a model.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArgs {
    /// Folder, or name of a pulled model; where no text is made of its weights also
    /// synth:CONFIG.json?scheme=S&layers=N&experts=N&seed=S
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    /// Form of the K/V cache
    #[arg(long, value_enum, default_value_t = Kv::Int8, env = "CLARY_KV")]
    pub(crate) kv: Kv,
    /// Most tokens of a sequence, or auto: what fits, up to the trained length
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = ctx, env = "CLARY_CTX")]
    pub(crate) ctx: Ctx,
    /// Whether the model thinks before it answers [default: on]
    #[arg(long, value_enum, env = "CLARY_THINKING")]
    pub(crate) thinking: Option<OnOff>,
    /// Variables for the chat template: enable_thinking, preserve_thinking, add_vision_id
    #[arg(long, value_name = "JSON", alias = "default-chat-template-kwargs", env = "CLARY_TEMPLATE_KWARGS")]
    pub(crate) template_kwargs: Option<String>,
}

impl ModelArgs {
    /// The same on the device of this name.
    pub(crate) fn on(&self, device: String) -> Self {
        let machine = MachineArgs { device, ..self.machine.clone() };
        Self { machine, ..self.clone() }
    }
}

/// What a model is run on.
#[derive(Clone, Debug, Args)]
pub(crate) struct MachineArgs {
    /// cpu, cuda:0 (the first NVIDIA card), auto (a card with enough free memory, else cpu), or reference
    /// (float64, slow, the judge of errors)
    #[arg(long, value_name = "NAME", default_value = "auto", env = "CLARY_DEVICE")]
    pub(crate) device: String,
    /// Bytes (also as 12GiB) or percent (80%) of the memory that is free at start
    #[arg(long, value_name = "BYTES|PERCENT", default_value = "95%", value_parser = memory_limit)]
    #[arg(env = "CLARY_MEMORY_LIMIT")]
    pub(crate) memory_limit: MemoryLimit,
}

/// `--threads` of commands that use one number of them.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct ThreadsArg {
    /// Threads of the cpu device [default: physical cores]
    #[arg(long, value_name = "N", value_parser = up_to::<THREADS_MAX>, env = "CLARY_THREADS")]
    pub(crate) threads: Option<usize>,
}

/// `--draft` of commands that make replies.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DraftArg {
    /// Tokens drafted ahead: auto (measured at start), off, or 1 to 8; changes speed, never the reply
    #[arg(long, value_name = "auto|off|K", default_value = "auto", value_parser = draft, env = "CLARY_DRAFT")]
    pub(crate) draft: Draft,
}

/// `--draft`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Draft {
    /// As deep as pays.
    Auto,
    /// Never.
    Off,
    /// This deep.
    Depth(u8),
}

fn draft(text: &str) -> Result<Draft, String> {
    match text {
        "auto" => Ok(Draft::Auto),
        "off" => Ok(Draft::Off),
        depth => match depth.parse() {
            Ok(depth) if (1..=engine::DRAFT_MAX as u8).contains(&depth) => Ok(Draft::Depth(depth)),
            _ => Err(format!("auto, off, or 1 to {}", engine::DRAFT_MAX)),
        },
    }
}

/// Form of the K/V cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kv {
    /// 8-bit codes.
    Int8,
    /// 16-bit codes: twice the memory, nearer to exact. Changes the bits of a reply.
    Int16,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOff {
    /// On.
    On,
    /// Off.
    Off,
}

/// `--ctx`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ctx {
    /// What fits.
    Auto,
    /// This many tokens.
    Tokens(usize),
}

/// `--memory-limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MemoryLimit {
    /// Bytes.
    Bytes(u64),
    /// Percent of what is free.
    Percent(f64),
}

pub(crate) fn ctx(text: &str) -> Result<Ctx, String> {
    match text {
        "auto" => Ok(Ctx::Auto),
        number => match number.parse() {
            Ok(tokens) if tokens > 0 => Ok(Ctx::Tokens(tokens)),
            _ => Err("a number of tokens above 0, or auto".into()),
        },
    }
}

/// Most threads: more than any machine has.
const THREADS_MAX: usize = 1024;
/// Most rows of a scored forward.
const CHUNK_MAX: usize = 4096;
/// Most requests at once.
const STREAMS_MAX: usize = 32;
/// Nothing else that is counted is more.
const COUNT_MAX: usize = 1_000_000;

/// A number from 1 to `MAX`.
pub(crate) fn up_to<const MAX: usize>(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=MAX).contains(number));
    number.ok_or_else(|| format!("a number from 1 to {MAX}"))
}

/// A number of what has no limit of its own.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    up_to::<COUNT_MAX>(text)
}

pub(crate) fn temperature(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|value| (0.0..=5.0).contains(value)).ok_or("a number from 0 to 5".into())
}

pub(crate) fn top_p(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|value| *value > 0.0 && *value <= 1.0);
    value.ok_or("a number above 0, up to 1".into())
}

pub(crate) fn top_k(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("a number from 0 to {}", u32::MAX))
}

pub(crate) fn min_p(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|value| (0.0..=1.0).contains(value)).ok_or("a number from 0 to 1".into())
}

pub(crate) fn memory_limit(text: &str) -> Result<MemoryLimit, String> {
    let expected =
        || "bytes (12884901888, 12GiB, 12000MiB) or a percentage above 0, up to 100% (80%)".to_owned();
    if let Some(percent) = text.strip_suffix('%') {
        let percent: f64 = percent.trim().parse().map_err(|_| expected())?;
        let is_valid = percent > 0.0 && percent <= 100.0;
        return if is_valid { Ok(MemoryLimit::Percent(percent)) } else { Err(expected()) };
    }
    bytes(text).filter(|bytes| *bytes > 0).map(MemoryLimit::Bytes).ok_or_else(expected)
}

/// A size with or without a binary unit.
pub(crate) fn bytes(text: &str) -> Option<u64> {
    let units = [("KiB", 1u64 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40), ("", 1)];
    let (number, unit) = units
        .iter()
        .find_map(|(name, bytes)| Some((text.strip_suffix(name)?, *bytes)))
        .expect("the empty suffix always matches");
    number.trim().parse::<u64>().ok()?.checked_mul(unit)
}

/// How to draw tokens. What is not given comes from the model's generation config.
#[derive(Clone, Debug, Args)]
pub(crate) struct SamplingArgs {
    /// 0 to 5; 0 is greedy
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = temperature)]
    pub(crate) temperature: Option<f32>,
    /// Above 0, up to 1: the most probable tokens with this much probability
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = top_p)]
    pub(crate) top_p: Option<f32>,
    /// The K most probable tokens; 0 for all
    #[arg(long, value_name = "K", value_parser = top_k)]
    pub(crate) top_k: Option<u32>,
    /// 0 to 1: tokens with at least this share of the best one's probability
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = min_p)]
    pub(crate) min_p: Option<f32>,
    /// Key of every draw; the same seed gives the same reply [default: random, shown with -v]
    #[arg(long, value_name = "S")]
    pub(crate) seed: Option<u64>,
    /// Most tokens of a reply [default: rest of the context]
    #[arg(long, value_name = "N")]
    pub(crate) max_tokens: Option<usize>,
}

/// `info`.
#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    /// Folder, or synth:CONFIG.json?...
    pub(crate) model: String,
}

/// `check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Folder
    pub(crate) model: String,
}

/// A model that replies to a person, and how.
#[derive(Debug, Args)]
pub(crate) struct ReplyArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArg,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
    #[command(flatten)]
    pub(crate) vision: VisionArgs,
    /// Instructions put before what is asked
    #[arg(long, value_name = "S")]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

/// `run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) reply: ReplyArgs,
    /// The question; - reads it from stdin, as does leaving it out where stdin is no terminal
    pub(crate) prompt: Option<String>,
    /// A picture put before the question; may be given several times
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Vec<PathBuf>,
    /// The answer is JSON of this JSON Schema
    #[arg(long, value_name = "FILE")]
    pub(crate) json_schema: Option<PathBuf>,
}

/// `chat`.
#[derive(Debug, Args)]
#[command(after_help = format!("At the prompt:\n{}", crate::commands::chat::HELP))]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) reply: ReplyArgs,
}

/// `logits`.
#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
    /// JSON array of token ids; - for stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) ids: PathBuf,
    /// Where to write the scores, as safetensors
    #[arg(long, value_name = "FILE.safetensors")]
    pub(crate) out: Option<PathBuf>,
    /// Rows of one forward; changes no byte of the result
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = up_to::<CHUNK_MAX>)]
    pub(crate) chunk: usize,
    /// Also the MTP layer's scores of the token after the next
    #[arg(long)]
    pub(crate) mtp: bool,
}

/// `synth`.
#[derive(Debug, Args)]
pub(crate) struct SynthArgs {
    /// Where to write it: a new or empty folder
    pub(crate) dir: PathBuf,
    /// The config.json whose geometry is taken; tokenizer files beside it are copied
    #[arg(long, value_name = "CONFIG.json")]
    pub(crate) like: PathBuf,
    /// bf16, mlx-4bit, mlx-3bit-experts or w4a16
    #[arg(long, value_name = "S")]
    pub(crate) scheme: String,
    /// Other number of layers
    #[arg(long, value_name = "N")]
    pub(crate) layers: Option<usize>,
    /// Other number of experts
    #[arg(long, value_name = "N")]
    pub(crate) experts: Option<usize>,
    /// Other numbers
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Numbers of threads of the cpu device [default: physical cores]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = up_to::<THREADS_MAX>)]
    pub(crate) threads: Vec<usize>,
    /// Prompt lengths
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = count)]
    #[arg(default_value = "32,128,512")]
    pub(crate) prompt: Vec<usize>,
    /// Tokens decoded after each prompt
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = count)]
    pub(crate) tokens: usize,
    /// Repetitions of each case
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = count)]
    pub(crate) reps: usize,
    /// Instead of one sequence: these numbers of replies at once
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = up_to::<STREAMS_MAX>)]
    pub(crate) streams: Vec<usize>,
    /// With --streams: drafted, plain or both, which must give the same tokens
    #[arg(long, value_name = "on,off", value_delimiter = ',', value_enum, requires = "streams")]
    #[arg(default_value = "on,off")]
    pub(crate) drafts: Vec<OnOff>,
    /// With --streams: how the drafted ones draft: auto (as measured), or 1 to 8 tokens a round
    #[arg(long, value_name = "auto|K", default_value = "auto", value_parser = draft, requires = "streams")]
    pub(crate) draft: Draft,
}

/// `eval`.
#[derive(Debug, Subcommand)]
pub(crate) enum Eval {
    /// The exactness contracts on this machine and model: exit code 7 if one does not hold
    Exact(ExactArgs),
    /// Questions about pictures, alone and in company, plain and drafted: exit code 7 if replies differ, 8 if
    /// too few are right
    Vision(VisionEvalArgs),
}

/// `eval vision`.
#[derive(Debug, Args)]
pub(crate) struct VisionEvalArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
    #[command(flatten)]
    pub(crate) vision: VisionArgs,
    /// Folder with items.jsonl and the pictures it names [default: eval in the model's folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) set: Option<PathBuf>,
    /// Numbers of questions asked at once
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = up_to::<STREAMS_MAX>)]
    #[arg(default_value = "1,8")]
    pub(crate) streams: Vec<usize>,
    /// Replies that must be right
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) least: usize,
}

/// `eval exact`.
#[derive(Debug, Args)]
pub(crate) struct ExactArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
    /// Numbers of requests at once
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = up_to::<STREAMS_MAX>)]
    #[arg(default_value = "1,2,4,8")]
    pub(crate) streams: Vec<usize>,
    /// Every depth and length: takes many times longer
    #[arg(long)]
    pub(crate) full: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn memory_limits() {
        let check =
            |text: &str, wanted: Option<MemoryLimit>| assert_eq!(memory_limit(text).ok(), wanted, "{text}");
        check("80%", Some(MemoryLimit::Percent(80.0)));
        check("12GiB", Some(MemoryLimit::Bytes(12 << 30)));
        check("1024", Some(MemoryLimit::Bytes(1024)));
        for text in ["", "0", "0%", "101%", "nan%", "-1", "12GB", "99999999999TiB"] {
            check(text, None);
        }
    }
}
