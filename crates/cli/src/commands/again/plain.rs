//! A model that answers as plainly as it can: no drafts, no cache, one slot for each reply of a prompt.

use std::sync::Arc;

use engine::{CacheLimits, DraftPolicy, Drafting, Engine};
use serde_json::{Map, Value};
use server::http::{
    App, ModelInfo, Receipt, Rerun, RerunError, SamplingSource, Settings, SettingsError, Typed, rerun,
};
use server::{Session, TextSide};
use text::{GrammarCompiler, LateSystem, Tokenizer};
use tokio::runtime::Builder;

use super::AgainArgs;
use super::compare::{Difference, kv_name};
use crate::args::{Ctx, Draft, Kv, ModelArgs};
use crate::commands::version;
use crate::error::{Exit, Failure, Result};
use crate::load::{self, Sizes};
use crate::output::Output;
use crate::store::Store;
use crate::vision;
use crate::weights::Weights;

/// Options of the server that decide what a request means.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    /// Whether requests that do not say think.
    pub(crate) thinking: Option<bool>,
    /// Variables for the chat template.
    pub(crate) kwargs: Map<String, Value>,
    /// What becomes of a system message that does not lead.
    pub(crate) late_system: LateSystem,
}

/// A server without a socket, for one request.
pub(crate) struct Plain {
    app: App,
    tokenizer: Tokenizer,
    receipt: Receipt,
}

impl Plain {
    /// Loads the model if it is that of the receipt; else the difference, before any weight is read.
    pub(crate) fn open(
        receipt: &Receipt,
        model: Option<&str>,
        args: &AgainArgs,
        words: Words,
        output: &Output,
    ) -> Result<std::result::Result<Self, Difference>> {
        if args.machine.device == "reference" {
            let message = "the reference device is outside the contracts: its bits are others";
            return Err(Failure::usage(message).hint("--device cpu"));
        }
        let settings = settings(receipt, words)?;
        let model = match model {
            Some(model) => model.to_owned(),
            None => stored(receipt)?,
        };
        let weights = Weights::open(&model)?;
        let text = TextSide::open(&weights.dir)?;
        let digest = weights.digest()?;
        let digests = [
            ("model", &receipt.model, &digest),
            ("tokenizer", &receipt.tokenizer, &format!("sha256:{}", text.tokenizer.digest())),
            ("template", &receipt.template, &format!("sha256:{}", text.template.digest())),
        ];
        if let Some((what, then, now)) = digests.into_iter().find(|(_, then, now)| then != now) {
            let message = format!("another {what}: {then} in the receipt, {now} here");
            return Ok(Err(Difference::new(what, message)));
        }
        let kv = args.kv.map_or_else(|| kv(&receipt.kv), Ok)?;
        let device = load::named(&args.machine.device, &weights);
        let model_args = model_args(receipt, &model, args, kv).on(device);
        let mut device = load::device(&model_args.machine.device, args.threads.threads)?;
        let vision = match receipt.images.is_empty() {
            true => None,
            false => vision::settle(&weights, &args.vision, &mut *device)?,
        };
        let image_tokens = vision.as_ref().map_or(0, |vision| vision.tokens_max);
        let reply = Sizes::reply(model_args.ctx, Draft::Off);
        let sizes = Sizes { slots: slots(receipt), image_tokens, ..reply };
        let loaded = load::load_on(&weights, &model_args, device, sizes, output)?;
        let info = ModelInfo {
            digest,
            kv: kv_name(kv).to_owned(),
            build: version::commit().to_owned(),
            device: loaded.qwen.device().name(),
            ..ModelInfo::default()
        };
        let grammar = GrammarCompiler::new(&text.tokenizer, &text.defaults.stop_ids)?;
        let ends = text.defaults.stop_ids.clone();
        let engine = Engine::start(
            Box::new(loaded.qwen),
            engine::Settings {
                cache: CacheLimits { bytes_max: 0, ..CacheLimits::default() },
                calibrate: false,
                ..engine::Settings::new(text.tokenizer.vocab_size(), ends)
            },
        )?;
        let tokenizer = text.tokenizer.clone();
        let app = App::new(settings, "again");
        let mut session = Session::new(text, engine);
        if let Some(vision) = vision {
            session = session.with_vision(vision::start(vision)?);
        }
        app.serve_model(session, info, Some(Arc::new(grammar)));
        Ok(Ok(Self { app, tokenizer, receipt: receipt.clone() }))
    }

    /// Answers the request.
    pub(crate) fn run(&self, request: Map<String, Value>) -> Result<std::result::Result<Rerun, RerunError>> {
        let failed = |error| Failure::new(Exit::Failure, format!("threads: {error}"));
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        Ok(runtime.block_on(rerun(&self.app, &self.receipt.route, request, self.receipt.seed)))
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }
}

/// The model of the store that a receipt names.
fn stored(receipt: &Receipt) -> Result<String> {
    let store = Store::new(None)?;
    for entry in store.entries()?.into_iter().filter(|entry| entry.is_whole) {
        let folder = entry.dir.display().to_string();
        // A model that cannot be opened is not the one that answered.
        if Weights::open(&folder)
            .and_then(|weights| weights.digest())
            .is_ok_and(|digest| digest == receipt.model)
        {
            return Ok(folder);
        }
    }
    let message = format!("no model in {} is that of the receipt, {}", store.root.display(), receipt.model);
    Err(Failure::new(Exit::Model, message).hint("name the folder that the reply was made with"))
}

/// One for each reply to a prompt: they begin together.
fn slots(receipt: &Receipt) -> usize {
    (receipt.sampling.n as usize).clamp(1, engine::CHOICES_MAX as usize)
}

fn kv(name: &str) -> Result<Kv> {
    [Kv::Int8, Kv::Int16].into_iter().find(|kv| kv_name(*kv) == name).ok_or_else(|| {
        Failure::usage(format!("receipt: kv is {name:?}; int8 and int16 are known"))
            .hint("was it written by this version of the program?")
    })
}

fn model_args(receipt: &Receipt, model: &str, args: &AgainArgs, kv: Kv) -> ModelArgs {
    let ctx = args.ctx.unwrap_or(match receipt.context {
        0 => Ctx::Auto,
        tokens => Ctx::Tokens(tokens),
    });
    ModelArgs {
        model: model.to_owned(),
        kv,
        ctx,
        machine: args.machine.clone(),
        thinking: None,
        template_kwargs: None,
    }
}

/// Settings under which a request that leaves something open means what the receipt says.
fn settings(receipt: &Receipt, words: Words) -> Result<Settings> {
    let sampling = &receipt.sampling;
    let typed = Typed {
        // The only default that no option sets: 1, or the model's.
        sampling: match sampling.repetition_penalty == 1.0 {
            true => SamplingSource::OpenAi,
            false => SamplingSource::Model,
        },
        temperature: Some(sampling.temperature),
        top_p: Some(sampling.top_p),
        top_k: Some(sampling.top_k),
        min_p: Some(sampling.min_p),
        thinking: words.thinking,
        template_kwargs: words.kwargs,
        late_system: words.late_system,
        thinking_budget: sampling.thinking_budget.map_or(-1, |budget| budget as i64),
        close_reasoning: sampling.close_reasoning,
        drafting: Drafting { policy: DraftPolicy::Off, ..Drafting::default() },
        ..Typed::default()
    };
    Settings::new(typed).map_err(|error| match error {
        SettingsError::ThinkingTwice => Failure::usage(error.to_string()).hint("give one of the two"),
        error => {
            Failure::new(Exit::Mismatch, format!("receipt: {error}")).hint("no server writes such a receipt")
        }
    })
}
