//! One case: a prompt, then tokens one at a time.

use std::time::{Duration, Instant};

use checkpoint::Kind;
use device::PAGE_TOKENS;
use model::qwen3_5::{Config, Parts, Qwen, inventory, text_rows};
use model::{Draw, Logits, Model, Row, SlotId, Window};
use sha2::{Digest, Sha256};

use crate::error::{Exit, Failure, Result};
use crate::table;

/// Tokens of the run before the first measured one.
const WARM_UP: usize = 8;

/// A prompt length with a number of threads, and what its repetitions gave.
pub(super) struct Case {
    /// Threads.
    pub(super) threads: usize,
    /// Tokens of the prompt.
    pub(super) prompt: usize,
    /// Tokens decoded after it.
    pub(super) tokens: usize,
    /// Bytes read for one decoded token in the middle of the reply.
    pub(super) bytes_per_token: u64,
    /// Prompt to first token, for each repetition.
    pub(super) prefill: Vec<Duration>,
    /// All tokens after the first, for each repetition.
    pub(super) decode: Vec<Duration>,
    /// Digest of the greedy tokens, for each repetition.
    pub(super) hashes: Vec<String>,
}

impl Case {
    pub(super) fn new(qwen: &Qwen, threads: usize, prompt: usize, tokens: usize) -> Self {
        Self {
            threads,
            prompt,
            tokens,
            bytes_per_token: qwen.bytes_per_token(prompt + tokens / 2),
            prefill: Vec::new(),
            decode: Vec::new(),
            hashes: Vec::new(),
        }
    }

    /// Runs it once more.
    pub(super) fn run(&mut self, qwen: &mut Qwen) -> Result {
        let ids = prompt(self.prompt, 0, qwen.spec().vocabulary);
        let mut sequence = Sequence::new(qwen, self.prompt + self.tokens)?;
        let start = Instant::now();
        let mut last = sequence.feed(&text_rows(&ids))?;
        self.prefill.push(start.elapsed());
        let mut digest = Sha256::new();
        digest.update(last.to_le_bytes());
        let start = Instant::now();
        for position in self.prompt..self.prompt + self.tokens {
            last = sequence.feed(&[Row { token: Some(last), position: [position as u32; 3] }])?;
            digest.update(last.to_le_bytes());
        }
        self.decode.push(start.elapsed());
        self.hashes.push(table::hex(&digest.finalize()));
        Ok(())
    }
}

/// A short run, so that the first measured one finds memory mapped and threads awake.
pub(super) fn warm_up(qwen: &mut Qwen) -> Result {
    let tokens = WARM_UP.min(qwen.spec().context_max);
    let ids = prompt(tokens, 0, qwen.spec().vocabulary);
    Sequence::new(qwen, tokens)?.feed(&text_rows(&ids))?;
    Ok(())
}

/// Token ids that go all over the vocabulary, the same ones in every run, others for each stream.
pub(super) fn prompt(tokens: usize, stream: usize, vocabulary: usize) -> Vec<u32> {
    let id = |at: usize| ((stream as u64) << 32 | (at as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    (0..tokens).map(|at| (id(at) % vocabulary as u64) as u32).collect()
}

/// Multiply-adds of the weight matrices that one prompt token goes through. The head is not among them: it
/// scores the last token of a prompt only.
pub(super) fn work(config: &Config) -> u64 {
    let parts = Parts { head: false, mtp: false, vision: false };
    let table = |name: &str| name.ends_with("embed_tokens") || name.ends_with("lm_head");
    let one = |one: &checkpoint::Expected| match one.kind {
        Kind::Matrix { rows, cols } if !table(&one.name) => (rows * cols) as u64,
        Kind::Experts { rows, cols, .. } => (config.picks * rows * cols) as u64,
        _ => 0,
    };
    inventory(config, parts).iter().map(one).sum()
}

/// Slot 0 with the first pages.
struct Sequence<'a> {
    qwen: &'a mut Qwen,
    pages: Vec<u32>,
    length: usize,
}

impl<'a> Sequence<'a> {
    fn new(qwen: &'a mut Qwen, tokens: usize) -> Result<Self> {
        qwen.load(SlotId(0), None)?;
        Ok(Self { qwen, pages: (0..tokens.div_ceil(PAGE_TOKENS) as u32).collect(), length: 0 })
    }

    /// Steps over rows, as many at a time as go, and draws the token after the last.
    fn feed(&mut self, rows: &[Row]) -> Result<u32> {
        let steps = rows.len().div_ceil(self.qwen.spec().rows_max);
        for (at, part) in rows.chunks(self.qwen.spec().rows_max).enumerate() {
            let window = Window {
                slot: SlotId(0),
                start: self.length,
                rows: part.to_vec(),
                pages: self.pages.clone(),
                parents: None,
                commit: true,
                logits: if at + 1 == steps { Logits::Last } else { Logits::None },
            };
            self.qwen.step(&[window])?;
            self.length += part.len();
        }
        let vocabulary = self.qwen.spec().vocabulary as u32;
        let drawn = self.qwen.draw(&[Draw::greedy(0, self.length as u64, vocabulary)])?;
        let token = drawn.first().and_then(|drawn| drawn.token);
        token.ok_or_else(|| {
            let message = format!("numerical fault: the logits after token {} are not finite", self.length);
            Failure::new(Exit::Failure, message).hint("`clary check MODEL` looks for values that cause this")
        })
    }
}
