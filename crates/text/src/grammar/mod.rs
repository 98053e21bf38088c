//! Constraints on a reply (`docs/api.md` 3.4 and 3.5): JSON, JSON of a schema, regular expressions, choices
//! and tool calls, each as the set of tokens that may follow.
//!
//! A [`GrammarCompiler`] holds a tokenizer's ids as a trie, [`GrammarCompiler::compile`] makes a [`Grammar`]
//! of what is wanted, and a [`Matcher`] stands somewhere in one. What is compiled is enforced to the letter;
//! what cannot be enforced is refused ([`GrammarError`]).
//!
//! JSON is written on one line, with or without one space after a comma or colon, as the family writes it:
//! white space that the model may repeat would never have to end. Strings have no `\u` escapes, so that every
//! name and value has one spelling.

mod calls;
mod error;
mod formats;
mod matcher;
mod pattern;
mod plain;
mod schema;
mod vocabulary;

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use serde_json::{Value, json};

use crate::error::TextError;
use crate::message::Tool;
use crate::tokenizer::Tokenizer;
use pattern::Dialect;
use vocabulary::Vocabulary;

pub use error::{GrammarError, GrammarFault};
pub use matcher::{Grammar, Loosened, Matcher, NotAllowed};
pub use pattern::REGEX_BYTES_MAX;
pub use schema::SCHEMA_DEPTH_MAX;

/// Most choices of a constraint.
pub const CONSTRAINT_CHOICES_MAX: usize = 1024;
/// Most bytes of all choices together.
const CHOICES_BYTES_MAX: usize = 256 << 10;
/// Stack of a compilation. Schemas of the greatest depth take less than a quarter of it.
const STACK_BYTES: usize = 32 << 20;
/// Kinds of constraints keep within these, each of which is far less than a second and 64 MiB.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 20_000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 500_000,
    step_max_items: 400_000,
    max_lexer_states: 30_000,
    max_grammar_size: 200_000,
    precompute_large_lexemes: false,
    verbose_errors: false,
};

/// What the answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema.
    Schema(Value),
    /// A text that matches a regular expression (of the regex crate's dialect) as a whole.
    Regex(String),
    /// One of some texts.
    Choice(Vec<String>),
}

/// Which calls a reply may have.
#[derive(Clone, Copy, Debug)]
pub struct Calls<'t> {
    /// The functions that may be called. Arguments follow their schema; where not all of it can be enforced,
    /// a strict function is refused and another is enforced as far as it goes ([`Grammar::loosened`]).
    pub tools: &'t [Tool],
    /// The reply must be calls and nothing else.
    pub required: bool,
    /// More than one call may be made.
    pub parallel: bool,
}

/// Compiles constraints for one tokenizer. Cheap to clone; safe to share between threads.
#[derive(Clone)]
pub struct GrammarCompiler(Arc<Parts>);

struct Parts {
    tokenizer: Tokenizer,
    factory: ParserFactory,
    end_ids: Arc<[u32]>,
}

impl GrammarCompiler {
    /// A compiler for a tokenizer, whose replies end with one of `end_ids`. Takes about a second and some
    /// 10 MB for 250,000 tokens.
    pub fn new(tokenizer: &Tokenizer, end_ids: &[u32]) -> Result<Self, TextError> {
        let vocabulary: TokEnv = Arc::new(Vocabulary::new(tokenizer)?);
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&vocabulary, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| TextError::UnsupportedTokenizer {
            what: "the vocabulary".to_owned(),
            found: error.to_string(),
            supported: "byte-level tokens",
        })?;
        factory.quiet();
        *factory.limits_mut() = LIMITS;
        Ok(Self(Arc::new(Parts { tokenizer: tokenizer.clone(), factory, end_ids: end_ids.into() })))
    }

    /// Compiles what a reply may be: an answer, calls, or either; with calls that are not required and no
    /// answer, text with calls in it.
    pub fn compile(&self, answer: Option<&Answer>, calls: Option<&Calls>) -> Result<Grammar, GrammarError> {
        // Schemas are walked with recursion, bounded, but deeper than small stacks may bear.
        std::thread::scope(|scope| {
            let work = || self.compile_here(answer, calls);
            let worker = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES);
            let worker = worker.spawn_scoped(scope, work);
            let failed = || GrammarError::too_complex("", "no thread could be started to compile it");
            worker.map_err(|_| failed())?.join().map_err(|_| failed())?
        })
    }

    fn compile_here(&self, answer: Option<&Answer>, calls: Option<&Calls>) -> Result<Grammar, GrammarError> {
        let mut parts = calls::Parts::default();
        if let Some(answer) = answer.filter(|_| !calls.is_some_and(|calls| calls.required)) {
            parts.answer = Some(self::answer(answer)?);
        }
        let Some(calls) = calls else { return self.build(parts.into_grammar()) };
        let answer = parts.answer.clone();
        let loosened = calls::add(&mut parts, calls, &self.0.tokenizer, false)?;
        let error = match self.build(parts.into_grammar()) {
            Ok(grammar) => return Ok(grammar.with_loosened(loosened)),
            Err(error) if calls.tools.iter().all(|tool| tool.strict) => return Err(error),
            Err(error) => error,
        };
        // All together is too much: arguments of functions that are not strict are free then.
        let mut parts = calls::Parts::default();
        parts.answer = answer;
        let loosened = calls::add(&mut parts, calls, &self.0.tokenizer, true)?;
        self.build(parts.into_grammar()).map(|grammar| grammar.with_loosened(loosened)).map_err(|_| error)
    }

    fn build(&self, grammar: TopLevelGrammar) -> Result<Grammar, GrammarError> {
        let parser = self.0.factory.create_parser(grammar).map_err(|error| refusal(&format!("{error:#}")))?;
        let start = llguidance::Matcher::new(Ok(parser));
        // A first look: what begins with nothing will not end well.
        if start.deep_clone().compute_mask_or_eos().is_err() {
            return Err(GrammarError::unsupported("", "no reply can satisfy it"));
        }
        let end = self.0.tokenizer.vocab_size() as u32;
        Ok(Grammar::new(start, end, self.0.end_ids.clone()))
    }
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GrammarCompiler({:?})", self.0.tokenizer)
    }
}

/// The grammar of an answer.
fn answer(answer: &Answer) -> Result<GrammarWithLexer, GrammarError> {
    match answer {
        Answer::JsonObject => Ok(json_grammar(json!({"type": "object"}))),
        Answer::Schema(schema) => {
            schema::measure(schema)?;
            Ok(json_grammar(schema::enforced(schema)?))
        }
        Answer::Regex(text) => Ok(GrammarWithLexer::from_regex(&pattern::whole(text, Dialect::Whole, "")?)),
        Answer::Choice(choices) => choice(choices),
    }
}

fn choice(choices: &[String]) -> Result<GrammarWithLexer, GrammarError> {
    if choices.is_empty() || choices.len() > CONSTRAINT_CHOICES_MAX {
        let detail = format!("{} choices, must be 1 to {CONSTRAINT_CHOICES_MAX}", choices.len());
        return Err(GrammarError::invalid("", detail));
    }
    if let Some(index) = choices.iter().position(String::is_empty) {
        return Err(GrammarError::invalid("", "a choice must not be empty").at_index(index));
    }
    let bytes: usize = choices.iter().map(String::len).sum();
    if bytes > CHOICES_BYTES_MAX {
        let detail = format!("{bytes} bytes of choices, at most {CHOICES_BYTES_MAX}");
        return Err(GrammarError::too_complex("", detail));
    }
    let choices: Vec<String> = choices.iter().map(|text| regex_syntax::escape(text)).collect();
    Ok(GrammarWithLexer::from_regex(&format!("(?:{})", choices.join("|"))))
}

/// JSON of an enforced schema.
fn json_grammar(mut schema: Value) -> GrammarWithLexer {
    schema["x-guidance"] = json!({
        "whitespace_flexible": false,
        "item_separator": ", ?",
        "key_separator": ": ?",
        "json_allowed_escapes": "nrbtf\\\"",
    });
    GrammarWithLexer::from_json_schema(schema)
}

/// The compiler's own words are not passed on: they quote what it made of the request.
fn refusal(words: &str) -> GrammarError {
    let has = |marks: &[&str]| marks.iter().any(|mark| words.contains(mark));
    if has(&["Unsatisfiable", "unsatisfiable", "Regex is empty"]) {
        return GrammarError::unsupported("", "no value can satisfy all of it");
    }
    if has(&["circular references"]) {
        let detail = "a $ref that leads back to itself cannot have other keywords beside it";
        return GrammarError::unsupported("", detail);
    }
    if has(&["too large", "too complex", "too big", "exceeded", "fuel", "limit", "Unable to determine"]) {
        return GrammarError::too_complex(
            "",
            "takes more time or memory to prepare than is allowed; simplify it",
        );
    }
    GrammarError::unsupported("", "cannot be enforced as it stands; simplify it")
}
