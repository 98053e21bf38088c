//! Many prompts through one engine, so many at a time: their replies, and how drafts fared.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use engine::{Drafting, Event, Handle, Refusal, Request, Stats};

/// A prompt and the most tokens of its reply.
pub type Prompt = (Vec<u32>, usize);

/// What one prompt gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Asked {
    /// Tokens of the reply; without any if it failed.
    pub tokens: Vec<u32>,
    /// How many of them came at once: the first alone, then one number for each round.
    pub rounds: Vec<usize>,
    /// When each of these came, since the first request.
    pub arrived: Vec<Duration>,
    /// The engine's numbers.
    pub stats: Stats,
}

/// Greedy replies without cache, `at_once` requests on their way at any time, in order of the prompts.
pub fn ask_all(
    handle: &Handle,
    prompts: &[Prompt],
    drafting: Drafting,
    at_once: usize,
) -> Result<Vec<Asked>, Refusal> {
    let (sender, receiver) = channel();
    let start = Instant::now();
    let mut all = vec![Asked::default(); prompts.len()];
    let mut tickets = Vec::with_capacity(prompts.len());
    let (mut next, mut open) = (0, 0);
    while next < prompts.len() || open > 0 {
        if next < prompts.len() && open < at_once {
            let (prompt, max_tokens) = prompts[next].clone();
            let request = Request { cache: false, drafting, ..Request::new(prompt, max_tokens) };
            let (sender, at) = (sender.clone(), next);
            // The receiver lives as long as any request.
            tickets
                .push(handle.submit(request, Box::new(move |event: Event| drop(sender.send((at, event)))))?);
            next += 1;
            open += 1;
            continue;
        }
        // The engine ends every request; `sender` keeps the channel open.
        let Ok((at, event)) = receiver.recv() else { break };
        match event {
            Event::Tokens { tokens, .. } => {
                all[at].rounds.push(tokens.len());
                all[at].arrived.push(start.elapsed());
                all[at].tokens.extend(tokens);
            }
            Event::Finished { stats, .. } => {
                all[at].stats = *stats;
                open -= 1;
            }
            Event::Admitted { .. } | Event::Prefilled { .. } | Event::PromptScores { .. } => {}
        }
    }
    Ok(all)
}

/// What all streams gave while every one of them was decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Together {
    /// From the last stream's first token to the first stream's last.
    pub time: Duration,
    /// Tokens that came in it.
    pub tokens: usize,
    /// Rounds of the streams in it, each stream's counted apart.
    pub rounds: usize,
}

impl Together {
    /// Of replies that ran at once; `None` where one ended before another began.
    pub fn of(replies: &[Asked]) -> Option<Self> {
        let began = replies.iter().map(|reply| reply.arrived.first()).max()??;
        let ended = replies.iter().map(|reply| reply.arrived.last()).min()??;
        let time = ended.checked_sub(*began).filter(|time| !time.is_zero())?;
        let rounds = replies.iter().flat_map(|reply| reply.arrived.iter().zip(&reply.rounds));
        let inside = rounds.filter(|(at, _)| *at > began && *at <= ended);
        let (count, tokens) = inside.fold((0, 0), |(count, sum), (_, tokens)| (count + 1, sum + tokens));
        Some(Self { time, tokens, rounds: count })
    }

    /// Tokens per second of all streams together.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64()
    }

    /// Milliseconds of a round, of `streams` streams that share it.
    pub fn round_ms(&self, streams: usize) -> f64 {
        self.time.as_secs_f64() * 1e3 * streams as f64 / self.rounds.max(1) as f64
    }
}

/// How drafts of one depth fared.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Acceptance {
    /// For each place in the chain: drafts whose predecessors were all accepted and which were judged, and
    /// the accepted ones among them.
    pub at: Vec<(u64, u64)>,
    /// Rounds after each reply's first token.
    pub rounds: u64,
    /// Tokens that they gave.
    pub tokens: u64,
}

impl Acceptance {
    /// Of replies that were drafted `depth` deep. What was drafted for the place of a reply's end is not
    /// judged: nothing is drawn after it.
    pub fn of(replies: &[Asked], depth: usize) -> Self {
        let mut found = Self { at: vec![(0, 0); depth], ..Self::default() };
        for reply in replies {
            let rounds = reply.rounds.get(1..).unwrap_or_default();
            for (at, &tokens) in rounds.iter().enumerate() {
                let hits = tokens - 1;
                let is_last = at + 1 == rounds.len();
                found.rounds += 1;
                found.tokens += tokens as u64;
                for (place, (judged, accepted)) in found.at.iter_mut().enumerate() {
                    *accepted += u64::from(place < hits);
                    *judged += u64::from(place < hits || (place == hits && !is_last));
                }
            }
        }
        found
    }

    /// Share of accepted drafts at a place, given that those before were accepted.
    pub fn share(&self, place: usize) -> f64 {
        let (judged, accepted) = self.at[place];
        accepted as f64 / judged.max(1) as f64
    }

    /// Tokens that a round gives.
    pub fn tokens_per_round(&self) -> f64 {
        self.tokens as f64 / self.rounds.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_timed_while_all_of_them_decode() {
        let reply = |rounds: &[usize], ms: &[u64]| Asked {
            rounds: rounds.into(),
            arrived: ms.iter().map(|ms| Duration::from_millis(*ms)).collect(),
            ..Asked::default()
        };
        let two = [reply(&[1, 2, 1, 3], &[10, 20, 30, 40]), reply(&[1, 1, 1, 1], &[20, 30, 40, 50])];
        let together = Together::of(&two).expect("both decode from 20 to 40 ms");
        assert_eq!((together.time, together.tokens), (Duration::from_millis(20), 6));
        assert_eq!(together.rounds, 4);
        assert_eq!((together.rate(), together.round_ms(2)), (300.0, 10.0));
        let apart = [reply(&[1, 1], &[10, 20]), reply(&[1, 1], &[20, 30])];
        assert_eq!(Together::of(&apart), None);
        assert_eq!(Together::of(&[]), None);
        assert_eq!(Together::of(&[reply(&[], &[])]), None);
    }

    #[test]
    fn ends_of_replies_judge_no_draft() {
        let reply = |rounds: &[usize]| Asked { rounds: rounds.into(), ..Asked::default() };
        // First tokens, then rounds of two drafts: both right; the first right; none right; the end after
        // one.
        let found = Acceptance::of(&[reply(&[1, 3, 2, 1, 2]), reply(&[1]), reply(&[])], 2);
        assert_eq!(found.at, [(4, 3), (2, 1)]);
        assert_eq!((found.rounds, found.tokens), (4, 8));
        assert_eq!((found.share(0), found.tokens_per_round()), (0.75, 2.0));
    }
}
