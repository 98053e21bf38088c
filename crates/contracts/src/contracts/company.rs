//! E2: sequences in one step equal each of them alone, whatever the slots, pages, lengths and order.

use model::{Logits, ModelError, WINDOW_ROWS_MAX, Window};

use crate::lane::Random;
use crate::{Contract, Lane, Outcome, RowBits, Runner, Tally};

/// Lengths of windows: one row, a few, around a block, most of a span.
const LENGTHS: [usize; 6] = [1, 7, 63, 64, 65, 500];
/// Windows of a step.
const COMPANIES: [usize; 5] = [2, 3, 5, 8, 16];

/// Two steps of 2 to 16 windows each; some windows uncommitted, some scored in part.
pub fn company(runner: &mut Runner<'_>, text: &[u32]) -> Result<Outcome, ModelError> {
    let mut tally = Tally::default();
    let slots = runner.spec().slots;
    let mut lanes = runner.lanes()?;
    let texts: Vec<Vec<u32>> = (0..slots).map(|at| turned(text, at)).collect();
    let mut alone = Vec::with_capacity(slots);
    for ids in &texts {
        runner.clear(&mut lanes[0])?;
        alone.push(runner.feed(&mut lanes[0], ids, ids.len())?);
    }
    let mut random = Random(3);
    for count in COMPANIES.into_iter().filter(|count| *count <= slots) {
        let mut order: Vec<usize> = (0..slots).collect();
        shuffle(&mut order, &mut random);
        order.truncate(count);
        for lane in &mut lanes {
            runner.clear(lane)?;
        }
        for round in 0..2 {
            step(runner, &mut lanes, &order, &texts, &alone, round, &mut tally)?;
            shuffle(&mut order, &mut random);
        }
    }
    Ok(tally.outcome(Contract::Concurrent, "2 to 16 windows of 1 to 500 rows"))
}

/// The text beginning elsewhere.
fn turned(text: &[u32], at: usize) -> Vec<u32> {
    let mut text = text.to_vec();
    let by = at * 37 % text.len();
    text.rotate_left(by);
    text
}

fn shuffle(order: &mut [usize], random: &mut Random) {
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at + 1));
    }
}

/// The next window of every sequence of `order`, all in one step.
fn step(
    runner: &mut Runner<'_>,
    lanes: &mut [Lane],
    order: &[usize],
    texts: &[Vec<u32>],
    alone: &[Vec<RowBits>],
    round: usize,
    tally: &mut Tally,
) -> Result<(), ModelError> {
    let mut room = runner.spec().rows_max;
    let mut windows: Vec<Window> = Vec::with_capacity(order.len());
    for (at, &sequence) in order.iter().enumerate() {
        let lane = &lanes[sequence];
        let left = texts[sequence].len() - lane.length;
        let after = order.len() - 1 - at;
        let length = LENGTHS[(sequence + at + round) % LENGTHS.len()].min(left).min(room - after);
        if length == 0 {
            continue;
        }
        room -= length;
        let ids = &texts[sequence][lane.length..lane.length + length];
        windows.push(match (at + round) % 4 {
            0 if length <= WINDOW_ROWS_MAX => lane.window(ids, None),
            1 => lane.chunk(ids, Logits::Last),
            2 if round == 0 => lane.chunk(ids, Logits::None),
            _ => lane.chunk(ids, Logits::All),
        });
    }
    let mut found = runner.run(&windows)?.into_iter();
    for window in &windows {
        let lane = &mut lanes[window.slot.0 as usize];
        let rows = window.rows.len();
        let scored = match window.logits {
            Logits::None => 0,
            Logits::Last => 1,
            Logits::All => rows,
        };
        let end = window.start + rows;
        let found: Vec<_> = found.by_ref().take(scored).collect();
        let first = end - scored;
        tally.rows(&found, &alone[window.slot.0 as usize][first..end], first, || {
            format!("slot {} among {} windows", window.slot.0, windows.len())
        });
        match window.commit {
            true => lane.length = end,
            false => runner.keep(lane, &(0..rows).collect::<Vec<_>>())?,
        }
    }
    Ok(())
}
