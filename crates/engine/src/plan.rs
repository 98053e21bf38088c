//! Which rows run in the next step: a pure function of where everyone is and what fits.

use model::Logits;

/// What one sequence could do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// Slot.
    pub(crate) slot: usize,
    /// Order of arrival.
    pub(crate) order: u64,
    /// Work.
    pub(crate) work: Work,
}

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Prompt rows `from .. stop`; `stop` is the next place to make a snapshot, or the end.
    Prefill {
        /// First row.
        from: usize,
        /// Row behind the last.
        stop: usize,
        /// Whether the last row's logits are needed once `stop` is reached.
        ends: bool,
        /// Whether every row is scored.
        scored: bool,
    },
    /// The last token and up to this many drafted rows.
    Decode {
        /// Drafted rows wished for.
        drafts: usize,
    },
}

/// What a step can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepLimits {
    /// Rows.
    pub(crate) rows: usize,
    /// Rows of logits.
    pub(crate) logits: usize,
    /// Prompt rows that keep running streams from stalling.
    pub(crate) prompt_rows: usize,
    /// Turns the order of streams where not all fit.
    pub(crate) turn: u64,
}

/// One sequence's part of the step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Prompt rows `from .. to`.
    Chunk {
        /// Slot.
        slot: usize,
        /// First row.
        from: usize,
        /// Row behind the last.
        to: usize,
        /// Rows to score.
        logits: Logits,
    },
    /// The last token and at most this many drafted rows.
    Decode {
        /// Slot.
        slot: usize,
        /// Drafted rows.
        drafts: usize,
    },
}

/// Decode rows first, one for each stream; then drafts, dealt evenly; then prompts, oldest first.
pub(crate) fn plan(views: &[View], limits: StepLimits) -> Vec<Part> {
    let mut rows = limits.rows;
    let mut logits = limits.logits;
    let mut streams: Vec<(usize, usize)> = decoders(views);
    let prompts = prompts(views);
    // A prompt in hand keeps a share of the step, and one row of logits.
    let waiting: usize = usize::from(!prompts.is_empty());
    let turn = limits.turn as usize % streams.len().max(1);
    streams.rotate_left(turn);
    streams.truncate(rows.min(logits).saturating_sub(waiting).max(1));
    rows -= streams.len();
    logits -= streams.len();
    let spare = rows.saturating_sub(reserve(&prompts, limits, rows)).min(logits.saturating_sub(waiting));
    let drafts = deal(&streams, spare);
    let mut parts: Vec<Part> = Vec::with_capacity(views.len());
    for (&(slot, _), &drafts) in streams.iter().zip(&drafts) {
        rows -= drafts;
        logits -= drafts;
        parts.push(Part::Decode { slot, drafts });
    }
    let mut left = match streams.is_empty() {
        true => rows,
        false => rows.min(limits.prompt_rows),
    };
    for view in prompts {
        left -= chunk(view, left, &mut logits, &mut parts);
    }
    parts
}

/// Rows that drafts leave to prompts: what these can use, and never the whole step, or one long prompt would
/// end all drafting beside it.
fn reserve(prompts: &[&View], limits: StepLimits, rows: usize) -> usize {
    let usable = prompts.iter().map(|view| match view.work {
        Work::Prefill { from, stop, .. } => stop - from,
        Work::Decode { .. } => 0,
    });
    limits.prompt_rows.min(usable.sum()).min(rows - rows / 4)
}

/// Slots that decode with the drafts they wish for, by arrival.
fn decoders(views: &[View]) -> Vec<(usize, usize)> {
    let mut found: Vec<(u64, usize, usize)> = views
        .iter()
        .filter_map(|view| match view.work {
            Work::Decode { drafts } => Some((view.order, view.slot, drafts)),
            Work::Prefill { .. } => None,
        })
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, slot, drafts)| (slot, drafts)).collect()
}

fn prompts(views: &[View]) -> Vec<&View> {
    let mut found: Vec<&View> =
        views.iter().filter(|view| matches!(view.work, Work::Prefill { .. })).collect();
    found.sort_unstable_by_key(|view| view.order);
    found
}

/// Deals `spare` rows, one to each stream in turn, up to what each wishes.
fn deal(streams: &[(usize, usize)], mut spare: usize) -> Vec<usize> {
    let mut dealt = vec![0; streams.len()];
    let mut moved = true;
    while spare > 0 && moved {
        moved = false;
        for (have, &(_, wish)) in dealt.iter_mut().zip(streams) {
            if *have < wish && spare > 0 {
                *have += 1;
                spare -= 1;
                moved = true;
            }
        }
    }
    dealt
}

/// Adds a chunk of at most `left` rows; returns its rows.
fn chunk(view: &View, left: usize, logits: &mut usize, parts: &mut Vec<Part>) -> usize {
    let Work::Prefill { from, stop, ends, scored } = view.work else { return 0 };
    let mut to = stop.min(from + left);
    if scored {
        to = to.min(from + *logits);
    }
    if ends && to == stop && *logits == 0 {
        to -= 1;
    }
    if to <= from {
        return 0;
    }
    let wanted = match (scored, ends && to == stop) {
        (true, _) => Logits::All,
        (false, true) => Logits::Last,
        (false, false) => Logits::None,
    };
    *logits -= match wanted {
        Logits::All => to - from,
        Logits::Last => 1,
        Logits::None => 0,
    };
    parts.push(Part::Chunk { slot: view.slot, from, to, logits: wanted });
    to - from
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: StepLimits = StepLimits { rows: 64, logits: 16, prompt_rows: 20, turn: 0 };

    fn decode(slot: usize, drafts: usize) -> View {
        View { slot, order: slot as u64, work: Work::Decode { drafts } }
    }

    fn prefill(slot: usize, stop: usize, scored: bool) -> View {
        View { slot, order: slot as u64, work: Work::Prefill { from: 0, stop, ends: true, scored } }
    }

    fn check(views: &[View], limits: StepLimits, expected: &[Part]) {
        assert_eq!(plan(views, limits), expected);
    }

    fn chunk(slot: usize, to: usize, logits: Logits) -> Part {
        Part::Chunk { slot, from: 0, to, logits }
    }

    #[test]
    fn alone_a_prompt_takes_the_step() {
        check(&[prefill(0, 1000, false)], LIMITS, &[chunk(0, 64, Logits::None)]);
        check(&[prefill(0, 30, false)], LIMITS, &[chunk(0, 30, Logits::Last)]);
        check(&[prefill(0, 30, true)], LIMITS, &[chunk(0, 16, Logits::All)]);
    }

    #[test]
    fn beside_streams_a_prompt_takes_its_share() {
        let views = [decode(0, 2), prefill(1, 1000, false), prefill(2, 10, false)];
        check(&views, LIMITS, &[Part::Decode { slot: 0, drafts: 2 }, chunk(1, 20, Logits::None)]);
        let views = [decode(0, 0), prefill(1, 15, false), prefill(2, 10, false)];
        let expected =
            [Part::Decode { slot: 0, drafts: 0 }, chunk(1, 15, Logits::Last), chunk(2, 5, Logits::None)];
        check(&views, LIMITS, &expected);
    }

    #[test]
    fn drafts_are_dealt_evenly() {
        let views = [decode(0, 8), decode(1, 1), decode(2, 8)];
        let limits = StepLimits { logits: 10, ..LIMITS };
        let drafts: Vec<usize> = plan(&views, limits)
            .into_iter()
            .map(|part| match part {
                Part::Decode { drafts, .. } => drafts,
                Part::Chunk { .. } => 0,
            })
            .collect();
        assert_eq!(drafts, [3, 1, 3]);
    }

    #[test]
    fn waiting_prompts_leave_room_for_drafts() {
        let drafts = Part::Decode { slot: 0, drafts: 8 };
        let limits = StepLimits { prompt_rows: 64, ..LIMITS };
        check(&[decode(0, 8), prefill(1, 30, false)], limits, &[drafts.clone(), chunk(1, 30, Logits::Last)]);
        check(&[decode(0, 8), prefill(1, 1000, false)], limits, &[drafts, chunk(1, 55, Logits::None)]);
    }

    #[test]
    fn streams_that_do_not_fit_take_turns() {
        let views = [decode(0, 8), decode(1, 8), decode(2, 8)];
        let limits = StepLimits { logits: 2, turn: 1, ..LIMITS };
        check(&views, limits, &[Part::Decode { slot: 1, drafts: 0 }, Part::Decode { slot: 2, drafts: 0 }]);
    }
}
