//! One file per command.

pub(crate) mod again;
mod bench;
pub(crate) mod chat;
mod check;
pub(crate) mod config;
pub(crate) mod connect;
pub(crate) mod doctor;
mod eval;
pub(crate) mod image;
mod info;
mod logits;
mod manual;
pub(crate) mod pull;
mod run;
pub(crate) mod serve;
pub(crate) mod soak;
pub(crate) mod stored;
mod synth;
pub(crate) mod template;
pub(crate) mod top;
pub(crate) mod version;

use crate::args::{Cli, Command, ModelArgs};
use crate::error::Result;
use crate::output::Output;

/// Runs a command.
pub(crate) fn dispatch(cli: Cli, output: &Output) -> Result {
    match cli.command {
        Command::Info(args) => info::info(&args, output),
        Command::Check(args) => check::check(&args, output),
        Command::Run(args) => run::run(&args, output),
        Command::Chat(args) => chat::chat(&args, output),
        Command::Serve(args) => serve::serve(&args, output),
        Command::Pull(args) => pull::pull(&args, output),
        Command::List(args) => stored::list(&args, output),
        Command::Rm(args) => stored::rm(&args, output),
        Command::Verify(args) => again::verify(&args, output),
        Command::Replay(args) => again::replay(&args, output),
        Command::Bundle(args) => again::bundle(&args, output),
        Command::Logits(args) => logits::logits(&args, output),
        Command::Synth(args) => synth::synth(&args, output),
        Command::Image(args) => image::image(&args, output),
        Command::Eval { eval } => eval::eval(&eval, output),
        Command::Bench(args) => bench::bench(&args, output),
        Command::Template(args) => template::template(&args, output),
        Command::Doctor(args) => doctor::doctor(&args, output),
        Command::Connect(args) => connect::connect(&args, output),
        Command::Top(args) => top::top(&args, output),
        Command::Config { action } => config::config(&action, cli.global.config.as_deref(), output),
        Command::Soak(args) => soak::soak(&args, output),
        Command::Completions { shell } => manual::completions(shell, output),
        Command::Man { dir } => manual::manual(dir.as_deref(), output),
        Command::Version => version::version(output),
    }
}

/// Says so where an option of replies was given to a command that works on token ids.
fn no_template(args: &ModelArgs, output: &Output) -> Result {
    if args.thinking.is_some() || args.template_kwargs.is_some() {
        output.note(
            "note: --thinking and --template-kwargs change nothing here: token ids have no chat template",
        )?;
    }
    Ok(())
}
