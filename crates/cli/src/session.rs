//! A running model that speaks text, for `run` and `chat`.

use std::time::Duration;

use engine::Engine;
use server::{Session, TextSide};

use crate::args::{Draft, ReplyArgs};
use crate::error::Result;
use crate::load::{self, Sizes};
use crate::output::Output;
use crate::vision;
use crate::weights::Weights;

/// A session and how long it took to load.
pub(crate) struct Running {
    /// The session.
    pub(crate) session: Session,
    /// Reading the weights.
    pub(crate) load: Duration,
}

/// Opens text files first, so that a folder without them fails before its weights are read.
pub(crate) fn start(args: &ReplyArgs, sizes: Sizes, output: &Output) -> Result<Running> {
    start_with(args, sizes, output, |_| Ok(())).map(|(running, ())| running)
}

/// The same with something made of the text side, which may fail before the weights are read, too.
pub(crate) fn start_with<T>(
    ReplyArgs { model: args, vision, threads, .. }: &ReplyArgs,
    mut sizes: Sizes,
    output: &Output,
    make: impl FnOnce(&TextSide) -> Result<T>,
) -> Result<(Running, T)> {
    let weights = Weights::open(&args.model)?;
    let text = TextSide::open(&weights.dir)?;
    let made = make(&text)?;
    let args = &args.on(load::named(&args.machine.device, &weights));
    let mut device = load::device(&args.machine.device, threads.threads)?;
    let vision = vision::settle(&weights, vision, &mut *device)?;
    sizes.image_tokens = vision.as_ref().map_or(0, |vision| vision.tokens_max);
    let loaded = load::load_on(&weights, args, device, sizes, output)?;
    let mut settings = engine::Settings::new(text.tokenizer.vocab_size(), text.defaults.stop_ids.clone());
    settings.calibrate = sizes.draft == Draft::Auto;
    let engine = Engine::start(Box::new(loaded.qwen), settings)?;
    let mut session = Session::new(text, engine);
    if let Some(vision) = vision {
        session = session.with_vision(vision::start(vision)?);
    }
    Ok((Running { session, load: loaded.time }, made))
}
