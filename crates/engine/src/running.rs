//! A sequence in a slot.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use model::{Features, PAGE_TOKENS};

use crate::choose::{Account, Odds};
use crate::drafting::CopyIndex;
use crate::event::{DraftStats, FinishReason, Reply};
use crate::mask::Mask;
use crate::prefix_cache::EntryId;
use crate::request::Request;
use crate::sampling::Penalties;
use crate::store::CacheLimits;

/// Share of all snapshots that one prompt may leave, and the number that it always may.
const SNAPSHOTS_SHARE: usize = 4;
const SNAPSHOTS_MIN: usize = 2;

/// One choice of a request while it has a slot.
pub(crate) struct Running {
    pub(crate) order: u64,
    pub(crate) request: Rc<Request>,
    pub(crate) choice: u32,
    pub(crate) reply: Reply,
    pub(crate) namespace: Option<Rc<str>>,
    /// Prompt, then generated tokens.
    pub(crate) tokens: Vec<u32>,
    /// Their keys in the prefix cache.
    pub(crate) keys: Vec<u64>,
    /// Leading tokens that are part of the model's state: all but the last one once the prompt is done.
    pub(crate) committed: usize,
    /// Tokens the sequence may grow to.
    pub(crate) length_max: usize,
    /// Places its windows may use: those of its pages, inside the context.
    pub(crate) places_max: usize,
    /// Pages so far, and how many more are promised.
    pub(crate) pages: Vec<u32>,
    pub(crate) reserved: usize,
    /// Prompt lengths to make snapshots at, ascending, all ahead.
    pub(crate) snapshots_at: Vec<usize>,
    /// Entries of the prefix cache that this run used or made.
    pub(crate) entries: Vec<EntryId>,
    /// Features of the request's pictures, where they are known and not yet behind.
    pub(crate) features: Vec<Option<Arc<Features>>>,
    /// Time spent waiting for them.
    pub(crate) image: Duration,
    pub(crate) penalties: Penalties,
    pub(crate) mask: Option<Box<dyn Mask>>,
    pub(crate) copies: CopyIndex,
    pub(crate) odds_mtp: Odds,
    pub(crate) odds_copy: Odds,
    pub(crate) drafting: Wish,
    /// What drafts that the engine chose have cost it.
    pub(crate) account: Account,
    /// Whether the model expects drafts of it.
    pub(crate) kept_up: bool,
    /// Rounds since the model was asked for drafts.
    pub(crate) since_asked: u32,
    /// Tokens that the model's drafter does not know.
    pub(crate) unknown: usize,
    pub(crate) cache: crate::event::CacheReport,
    pub(crate) checkpoint: usize,
    pub(crate) drafts: DraftStats,
    pub(crate) arrived: Duration,
    pub(crate) admitted: Duration,
    pub(crate) prefilled: Duration,
}

/// What a stream would draft in the coming step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wish {
    /// Tokens of the chain.
    pub(crate) depth: usize,
    /// What its own history suggests, at most [`DRAFT_MAX`](crate::DRAFT_MAX) tokens.
    pub(crate) copy: Vec<u32>,
    /// Whether the copy is the chain; else the model is asked.
    pub(crate) copies: bool,
    /// Whether depth and width are the engine's choice.
    pub(crate) chosen: bool,
    /// Candidates for the first token, the chain's own among them; more than one make the window a tree.
    pub(crate) first: usize,
    /// What the model proposed as first token in this round, best first.
    pub(crate) candidates: Vec<u32>,
}

impl Running {
    pub(crate) fn prompt_length(&self) -> usize {
        self.request.prompt.len()
    }

    pub(crate) fn prefills(&self) -> bool {
        self.committed < self.prompt_length()
    }

    /// Counts tokens that are committed now and that the model's drafter must learn before it drafts: a page
    /// of them at a time it learns without being asked, or forgets where it is not kept up.
    pub(crate) fn commit(&mut self, tokens: usize) {
        self.committed += tokens;
        self.unknown += tokens;
        if !self.kept_up {
            self.unknown = self.unknown.min(self.committed % PAGE_TOKENS);
        }
        if self.unknown >= PAGE_TOKENS {
            self.unknown = 0;
        }
    }

    /// Tokens that may still be generated.
    pub(crate) fn remaining(&self) -> usize {
        self.length_max - self.tokens.len()
    }

    /// Last row of the prompt's next chunk, at most: before a picture that is not encoded yet.
    pub(crate) fn chunk_stop(&self) -> usize {
        let stop = self.snapshots_at.first().copied().unwrap_or(self.prompt_length());
        self.missing().next().map_or(stop, |at| stop.min(self.request.pictures[at].start.max(self.committed)))
    }

    /// Pictures that rows from here on need and that are not encoded.
    pub(crate) fn missing(&self) -> impl Iterator<Item = usize> + '_ {
        let ahead = |at: &usize| self.request.pictures[*at].end() > self.committed;
        (0..self.features.len()).filter(ahead).filter(|at| self.features[*at].is_none())
    }

    /// Whether nothing can run before a picture is encoded.
    pub(crate) fn awaits_picture(&self) -> bool {
        self.prefills() && self.chunk_stop() <= self.committed
    }

    /// Features and row of prompt index `index`, if it is in a picture.
    pub(crate) fn image_row(&self, index: usize) -> Option<(&Arc<Features>, usize)> {
        let pictures = &self.request.pictures;
        let at = pictures.partition_point(|span| span.end() <= index);
        let span = pictures.get(at).filter(|span| span.start <= index)?;
        Some((self.features[at].as_ref()?, index - span.start))
    }

    /// Lets go of features whose rows are behind.
    pub(crate) fn drop_features(&mut self) {
        for (span, features) in self.request.pictures.iter().zip(&mut self.features) {
            if span.end() <= self.committed {
                *features = None;
            }
        }
    }

    /// Appends a generated token; the reason if it is the last one.
    pub(crate) fn push(&mut self, token: u32, eos: &[u32]) -> Option<FinishReason> {
        self.keys.push(key(&self.request, self.tokens.len(), token));
        self.tokens.push(token);
        self.penalties.push(token);
        let sampling = &self.request.sampling;
        if !sampling.ignore_eos && eos.contains(&token) {
            return Some(FinishReason::Eos(token));
        }
        if sampling.stop_ids.contains(&token) {
            return Some(FinishReason::Stop(token));
        }
        if self.remaining() == 0 {
            return Some(FinishReason::Length);
        }
        if let Some(mask) = &mut self.mask {
            mask.advance(token);
        }
        None
    }
}

/// Cache keys of a request's prompt.
pub(crate) fn prompt_keys(request: &Request) -> Vec<u64> {
    request.prompt.iter().enumerate().map(|(index, &token)| key(request, index, token)).collect()
}

/// What the prefix cache compares: the token, and, where that does not say it all, its rotary position and
/// picture.
fn key(request: &Request, index: usize, token: u32) -> u64 {
    let rope = request.rope(index);
    let identity = request.identity.as_ref().and_then(|identity| identity.get(index)).copied().unwrap_or(0);
    if rope == [index as u32; 3] && identity == 0 {
        return u64::from(token);
    }
    let parts = [u64::from(token), u64::from(rope[0]), u64::from(rope[1]), u64::from(rope[2]), identity];
    let hash = parts.iter().fold(0x51ed_270b_9f8a_3c17u64, |hash, &part| {
        let mixed = (hash ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 29)
    });
    hash | 1 << 63
}

/// Where a prompt leaves snapshots, ascending: its end (less the last token, which must run again to be drawn
/// from), the caller's marks, and every so many tokens. Of too many, the end, the first mark (a system
/// prompt, as a rule) and the later ones are kept.
pub(crate) fn snapshots_at(
    request: &Request,
    from: usize,
    limits: &CacheLimits,
    snapshots: usize,
) -> Vec<usize> {
    let end = request.prompt.len() - 1;
    let mut wanted: Vec<usize> = Vec::new();
    if end > from && (request.choices > 1 || request.prompt.len() - from >= limits.prompt_end_min) {
        wanted.push(end);
    }
    let mut marks: Vec<usize> =
        request.marks.iter().copied().filter(|&mark| mark > from && mark < end).collect();
    marks.sort_unstable();
    marks.dedup();
    if !marks.is_empty() {
        wanted.push(marks.remove(0));
    }
    wanted.extend(marks.into_iter().rev());
    let spans = |tokens: usize| tokens.checked_div(limits.checkpoint_tokens).unwrap_or(0);
    let ends = spans(from) + 1..=spans(end.saturating_sub(1));
    wanted.extend(ends.rev().map(|count| count * limits.checkpoint_tokens));
    wanted.truncate((snapshots / SNAPSHOTS_SHARE).max(SNAPSHOTS_MIN));
    wanted.sort_unstable();
    wanted.dedup();
    wanted
}
