//! E1: a reply with drafts equals the plain one, whoever drafts and however deep.

use model::{DraftAsk, Draw, ModelError};

use crate::lane::{Random, draw_at, greedy, sampled};
use crate::{Contract, Lane, Outcome, RowBits, Runner, Tally};

/// Tokens of a reply.
const REPLY: usize = 48;
/// Tokens of the prompt: the reply crosses the end of the first block.
const PROMPT: usize = 40;

/// Who drafts.
#[derive(Clone, Copy, Debug)]
enum Drafter {
    /// The model's own layer, this deep.
    Mtp(usize),
    /// The same with alternatives for the first token: a tree.
    Tree(usize),
    /// Always right, this deep.
    Right(usize),
    /// Never right.
    Wrong(usize),
    /// A wrong chain first, then the right one beside it: what is kept lies apart from the sequence.
    Second(usize),
    /// Right up to a random depth.
    Mixed,
}

const DRAFTERS: [Drafter; 10] = [
    Drafter::Mtp(1),
    Drafter::Mtp(3),
    Drafter::Mtp(8),
    Drafter::Tree(1),
    Drafter::Tree(4),
    Drafter::Right(2),
    Drafter::Right(8),
    Drafter::Wrong(5),
    Drafter::Second(3),
    Drafter::Mixed,
];

/// A reply: its tokens, and the logits that each was drawn from.
#[derive(Default)]
struct Reply {
    tokens: Vec<u32>,
    rows: Vec<RowBits>,
}

/// Greedy and sampled replies with every drafter.
pub fn drafted(runner: &mut Runner<'_>, text: &[u32]) -> Result<Outcome, ModelError> {
    let mut tally = Tally::default();
    let mut lanes = runner.lanes()?;
    let slots = lanes.len();
    let room = runner.spec().context_max;
    let prompt = &text[..PROMPT.min(text.len()).min(room - REPLY - 10)];
    for (name, like) in [("greedy", greedy()), ("sampled", sampled(5))] {
        let plain = reply(runner, &mut lanes[0], prompt, &like, |_, _, _| Ok(Window::default()))?;
        for (at, drafter) in DRAFTERS.into_iter().enumerate() {
            let mut random = Random(at as u64);
            let draft = |runner: &mut Runner<'_>, lane: &Lane, known: &[u32]| {
                propose(runner, lane, known, drafter, &plain.tokens, &like, &mut random)
            };
            let found = reply(runner, &mut lanes[1 + at % (slots - 1)], prompt, &like, draft)?;
            tally.same(&found.tokens, &plain.tokens, || format!("{name}, {drafter:?}: tokens differ"));
            tally.rows(&found.rows, &plain.rows, prompt.len() - 1, || format!("{name}, {drafter:?}"));
        }
    }
    Ok(tally.outcome(Contract::Drafted, "MTP, trees, right and wrong drafts"))
}

/// Drafts that follow the last known token: rows of a window after its first.
#[derive(Default)]
struct Window {
    ids: Vec<u32>,
    /// Parents, counting the known token as row 0; `None` for a chain.
    parents: Option<Vec<Option<u32>>>,
}

/// What `drafter` proposes after `known`, the tokens of the reply so far; the last one is not stepped yet.
fn propose(
    runner: &mut Runner<'_>,
    lane: &Lane,
    known: &[u32],
    drafter: Drafter,
    plain: &[u32],
    like: &Draw,
    random: &mut Random,
) -> Result<Window, ModelError> {
    let vocabulary = runner.spec().vocabulary;
    let next = |count: usize| plain[known.len()..plain.len().min(known.len() + count)].to_vec();
    let wrong = |id: u32, by: usize| ((id as usize + 1 + by) % vocabulary) as u32;
    let chain = |ids| Window { ids, parents: None };
    Ok(match drafter {
        Drafter::Mtp(count) => {
            // Whatever else is drafted in between may not matter either.
            if random.below(4) == 0 {
                ask(runner, lane, wrong(known[known.len() - 1], 0), like, 2)?;
            }
            chain(ask(runner, lane, known[known.len() - 1], like, count)?.tokens)
        }
        Drafter::Tree(count) => {
            let draft = ask(runner, lane, known[known.len() - 1], like, count)?;
            let others = draft.first.iter().skip(1).map(|(token, _)| *token);
            // The known token is row 0, the chain follows it, the alternatives for its first token come last.
            let mut window = Window { ids: draft.tokens, parents: None };
            let mut parents: Vec<_> = (0..=window.ids.len() as u32).map(|row| row.checked_sub(1)).collect();
            for other in others {
                window.ids.push(other);
                parents.push(Some(0));
            }
            window.parents = Some(parents);
            window
        }
        Drafter::Right(count) => chain(next(count)),
        Drafter::Wrong(count) => {
            chain(next(count).into_iter().map(|id| wrong(id, random.below(vocabulary - 1))).collect())
        }
        Drafter::Second(count) => {
            let right = next(count);
            let first: Vec<u32> = right.iter().map(|id| wrong(*id, 0)).collect();
            let rows = first.len() as u32;
            let chain = |row: u32| if row == 1 || row == rows + 1 { 0 } else { row - 1 };
            let parents = (0..=2 * rows).map(|row| (row > 0).then(|| chain(row))).collect();
            Window { ids: [first, right].concat(), parents: Some(parents) }
        }
        Drafter::Mixed => {
            let mut ids = next(1 + random.below(12));
            let right = random.below(ids.len() + 1);
            ids.iter_mut().skip(right).for_each(|id| *id = wrong(*id, 0));
            chain(ids)
        }
    })
}

fn ask(
    runner: &mut Runner<'_>,
    lane: &Lane,
    token: u32,
    like: &Draw,
    count: usize,
) -> Result<model::Draft, ModelError> {
    let ask = DraftAsk {
        slot: lane.slot,
        token,
        start: lane.length,
        rope_delta: 0,
        pages: lane.pages.clone(),
        count,
        first_max: 3,
        confidence: 0.0,
        draw: draw_at(like, 0, lane.length + 1),
    };
    Ok(runner.model.draft(&[ask])?.pop().unwrap_or_default())
}

/// Generates a reply, verifying what `draft` proposes.
fn reply(
    runner: &mut Runner<'_>,
    lane: &mut Lane,
    prompt: &[u32],
    like: &Draw,
    mut draft: impl FnMut(&mut Runner<'_>, &Lane, &[u32]) -> Result<Window, ModelError>,
) -> Result<Reply, ModelError> {
    runner.clear(lane)?;
    let mut found = Reply::default();
    let rows = runner.feed(lane, prompt, prompt.len())?;
    let last = rows.len() - 1;
    let drawn = runner.draw(&[draw_at(like, last, lane.length)])?;
    found.rows.push(rows[last]);
    let Some(mut token) = drawn[0].token else { return Ok(found) };
    found.tokens.push(token);
    while found.tokens.len() < REPLY {
        let proposed = draft(runner, lane, &found.tokens)?;
        let ids: Vec<u32> = std::iter::once(token).chain(proposed.ids).collect();
        let window = lane.window(&ids, proposed.parents.as_deref());
        let rows = runner.run(std::slice::from_ref(&window))?;
        let draws: Vec<Draw> =
            (0..ids.len()).map(|row| draw_at(like, row, window.rows[row].position[0] as usize + 1)).collect();
        let drawn = runner.draw(&draws)?;
        let mut path = vec![0];
        loop {
            let row = path[path.len() - 1];
            found.rows.push(rows[row]);
            let Some(next) = drawn[row].token else { return Ok(found) };
            found.tokens.push(next);
            token = next;
            let follows = |child: &usize| {
                let parent = match &proposed.parents {
                    None => child.checked_sub(1),
                    Some(parents) => parents[*child].map(|parent| parent as usize),
                };
                parent == Some(row) && ids[*child] == next
            };
            match (row + 1..ids.len()).find(follows) {
                Some(child) if found.tokens.len() < REPLY => path.push(child),
                _ => break,
            }
        }
        runner.keep(lane, &path)?;
    }
    Ok(found)
}
