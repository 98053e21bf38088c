//! `clary logits`: teacher-forced scores of token ids.

use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

use model::qwen3_5::{Scored, Unprobed, text_rows};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::args::{Ctx, Draft, LogitsArgs};
use crate::error::{Exit, Failure, Result};
use crate::ids;
use crate::interrupt::Interrupt;
use crate::load::{self, Loaded, Sizes};
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::table;
use crate::target::Target;
use crate::weights::Weights;

/// Scores the ids, writes the file and prints its digest.
pub(crate) fn logits(args: &LogitsArgs, output: &Output) -> Result {
    super::no_template(&args.model, output)?;
    let interrupt = Interrupt::install()?;
    let weights = Weights::open(&args.model.model)?;
    let vocabulary = weights.config.vocabulary;
    let ids = ids::read(&args.ids, vocabulary)?;
    if args.mtp && !weights.parts.mtp {
        return Err(Failure::usage("--mtp: this model has no MTP layer").hint("leave --mtp out"));
    }
    let ctx = context(&args.model.ctx, ids.len(), weights.config.positions_max)?;
    let chunk = ids.len().min(args.chunk);
    let sizes = Sizes {
        slots: 1,
        snapshots: 0,
        ctx: Ctx::Tokens(ctx),
        rows_max: chunk,
        logits_rows_max: chunk,
        mtp: args.mtp,
        image_tokens: 0,
        draft: Draft::Off,
    };
    let mut loaded = load::load(&weights, &args.model, args.threads.threads, sizes, output)?;
    let mut sink = Sink::new(ids.len(), vocabulary, args.mtp, args.out.as_deref(), &interrupt)?;
    score(&mut loaded, &ids, chunk, args.mtp, &mut sink, output)?;
    let digests = sink.finish(&interrupt)?;
    report(&digests, ids.len(), vocabulary, args, output)
}

/// Room for the ids, or what was typed, which must be enough.
fn context(ctx: &Ctx, tokens: usize, most: usize) -> Result<usize> {
    if tokens > most {
        let message = format!("{tokens} token ids; this model was trained for {most} tokens");
        return Err(Failure::usage(message).hint("score the text in parts"));
    }
    match *ctx {
        Ctx::Tokens(wish) if wish < tokens => {
            Err(Failure::usage(format!("--ctx is {wish}, but there are {tokens} token ids"))
                .hint(format!("--ctx {tokens} is enough, and so is leaving it out")))
        }
        Ctx::Tokens(wish) => Ok(wish),
        Ctx::Auto => Ok(tokens),
    }
}

fn score(
    loaded: &mut Loaded,
    ids: &[u32],
    chunk: usize,
    mtp: bool,
    sink: &mut Sink,
    output: &Output,
) -> Result {
    let mut progress = Progress::new(output, "scoring", Unit::Count);
    let mut written = Ok(());
    let take = &mut |scored: Scored<'_>| {
        if written.is_ok() {
            written = sink.take(&scored);
            progress.set(scored.first as u64, ids.len() as u64);
        }
    };
    loaded.qwen.score(&text_rows(ids), &[], chunk, mtp, &mut Unprobed, take)?;
    drop(progress);
    written.map_err(|error| sink.failed(&error))
}

fn report(digests: &Digests, rows: usize, vocabulary: usize, args: &LogitsArgs, output: &Output) -> Result {
    let mtp = digests.mtp.as_deref();
    if output.json {
        let mut document = json!({"rows": rows, "vocab": vocabulary, "sha256": digests.logits});
        if let Some(mtp) = mtp {
            document["mtp_rows"] = (rows - 1).into();
            document["mtp_sha256"] = mtp.into();
        }
        if let Some(out) = &args.out {
            document["out"] = out.display().to_string().into();
        }
        return Ok(output.document(&document)?);
    }
    output.out(&format!("rows {rows}\nvocab {vocabulary}\nsha256 {}\n", digests.logits))?;
    if let Some(mtp) = mtp {
        output.out(&format!("mtp_rows {}\nmtp_sha256 {mtp}\n", rows - 1))?;
    }
    Ok(())
}

/// Where scores go: into digests, and into a file where one is wished.
struct Sink {
    logits: Sha256,
    mtp: Option<Sha256>,
    rows: usize,
    mtp_rows: usize,
    vocabulary: usize,
    scores: Option<Scores>,
}

/// The file of the scores.
struct Scores {
    target: Target,
    /// Where `logits` and `mtp_logits` begin.
    starts: [u64; 2],
}

/// Digests of the scores' bytes.
struct Digests {
    logits: String,
    mtp: Option<String>,
}

impl Sink {
    fn new(
        rows: usize,
        vocabulary: usize,
        mtp: bool,
        out: Option<&Path>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let scores = match out {
            Some(path) => Some(Scores::new(path, rows, vocabulary, mtp, interrupt)?),
            None => None,
        };
        let mtp = mtp.then(Sha256::new);
        Ok(Self { logits: Sha256::new(), mtp, rows: 0, mtp_rows: 0, vocabulary, scores })
    }

    fn take(&mut self, scored: &Scored<'_>) -> io::Result<()> {
        assert_eq!(scored.first, self.rows, "rows come in order");
        let bytes = le_bytes(scored.logits);
        self.logits.update(&bytes);
        if let Some(scores) = &mut self.scores {
            scores.write(0, self.rows * self.vocabulary, &bytes)?;
        }
        self.rows += scored.logits.len() / self.vocabulary;
        if let Some(mtp) = self.mtp.as_mut().filter(|_| !scored.mtp_logits.is_empty()) {
            assert_eq!(scored.mtp_first, self.mtp_rows, "rows come in order");
            let bytes = le_bytes(scored.mtp_logits);
            mtp.update(&bytes);
            if let Some(scores) = &mut self.scores {
                scores.write(1, self.mtp_rows * self.vocabulary, &bytes)?;
            }
            self.mtp_rows += scored.mtp_logits.len() / self.vocabulary;
        }
        Ok(())
    }

    fn failed(&self, error: &io::Error) -> Failure {
        match &self.scores {
            Some(scores) => scores.target.failed(error),
            None => Failure::new(Exit::Failure, format!("scores: {error}")),
        }
    }

    fn finish(self, interrupt: &Interrupt) -> Result<Digests> {
        if let Some(scores) = self.scores {
            scores.target.finish()?;
            interrupt.partial(None);
        }
        let hex = |digest: Sha256| table::hex(&digest.finalize());
        Ok(Digests { logits: hex(self.logits), mtp: self.mtp.map(hex) })
    }
}

fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

impl Scores {
    fn new(path: &Path, rows: usize, vocabulary: usize, mtp: bool, interrupt: &Interrupt) -> Result<Self> {
        let mut target = Target::create(path).map_err(|failure| failure.context("--out"))?;
        interrupt.partial(Some(target.partial.clone()));
        let (header, starts) = header(rows, vocabulary, mtp);
        target.file.write_all(&header).map_err(|error| target.failed(&error))?;
        Ok(Self { target, starts })
    }

    /// Writes values of tensor `which` from its value number `from` on.
    fn write(&mut self, which: usize, from: usize, bytes: &[u8]) -> io::Result<()> {
        self.target.file.seek(SeekFrom::Start(self.starts[which] + from as u64 * 4))?;
        self.target.file.write_all(bytes)
    }
}

/// A safetensors header, padded so that values are aligned, and where the two tensors begin.
fn header(rows: usize, vocabulary: usize, mtp: bool) -> (Vec<u8>, [u64; 2]) {
    let bytes = |rows: usize| (rows * vocabulary * 4) as u64;
    let (main, drafted) = (bytes(rows), bytes(rows - 1));
    let mut json =
        json!({"logits": {"dtype": "F32", "shape": [rows, vocabulary], "data_offsets": [0, main]}});
    if mtp {
        let offsets = [main, main + drafted];
        json["mtp_logits"] =
            json!({"dtype": "F32", "shape": [rows - 1, vocabulary], "data_offsets": offsets});
    }
    let mut text = json.to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    let start = header.len() as u64;
    (header, [start, start + main])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_say_where_values_are() {
        let (bytes, starts) = header(3, 5, true);
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!((bytes.len(), length % 8), (8 + length, 0));
        assert_eq!(starts, [bytes.len() as u64, bytes.len() as u64 + 60]);
        let json: serde_json::Value = serde_json::from_slice(&bytes[8..]).unwrap();
        assert_eq!(json["mtp_logits"], json!({"dtype": "F32", "shape": [2, 5], "data_offsets": [60, 100]}));
    }
}
