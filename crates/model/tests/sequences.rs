//! Windows, keeping, drafts and snapshots: whatever the way to a sequence, what follows has the same bits.

// A call that fails fails its test.
#![allow(clippy::unwrap_used)]

mod support;

use model::qwen3_5::{Qwen, Settings};
use model::{Draft, Logits, Model, Row, SlotId, SnapshotId, Window};
use support::*;

/// Logits of the last step's rows.
fn logits(qwen: &mut Qwen, rows: usize) -> Vec<Vec<f32>> {
    let vocabulary = qwen.spec().vocabulary;
    let mut read = |row| {
        let mut out = vec![0.0; vocabulary];
        qwen.read_logits(row, &mut out).unwrap();
        out
    };
    (0..rows).map(&mut read).collect()
}

/// Commits `ids` in chunks of `chunk` rows from `start` on; the logits of every row.
fn commit(qwen: &mut Qwen, slot: u32, start: usize, ids: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for (at, part) in ids.chunks(chunk).enumerate() {
        let start = start + at * chunk;
        let step = window(slot, start, rows(part, start), true, Logits::All);
        let count = qwen.step(&[step]).unwrap();
        assert_eq!(count, part.len());
        all.extend(logits(qwen, count));
    }
    all
}

fn text(folder: &str) -> Vec<u32> {
    prompts(folder).remove(0).ids
}

fn draft(qwen: &mut Qwen, slot: u32, start: usize, token: u32) -> Draft {
    qwen.draft(&[ask(slot, start, token, 0, 4)]).unwrap().remove(0)
}

#[test]
fn chunks_steps_slots_and_company_do_not_change_a_bit() {
    On::ALL.into_iter().for_each(chunks);
}

fn chunks(on: On) {
    let ids = text("tiny-b");
    let mut qwen = open_fixture(on, "tiny-b", settings());
    let expected = commit(&mut qwen, 0, 0, &ids, ids.len());
    let drafted = draft(&mut qwen, 0, ids.len(), 700);
    assert_eq!(drafted.tokens.len(), 4);
    for chunk in [1, 7, 64, 90] {
        qwen.load(SlotId(2), None).unwrap();
        assert!(commit(&mut qwen, 2, 0, &ids, chunk) == expected, "chunks of {chunk}");
        assert_eq!(draft(&mut qwen, 2, ids.len(), 700), drafted, "after chunks of {chunk}");
    }
    // Two sequences in one step, the second one row longer.
    qwen.load(SlotId(0), None).unwrap();
    qwen.load(SlotId(1), None).unwrap();
    let other: Vec<u32> = ids.iter().rev().copied().take(40).collect();
    let steps = [
        window(1, 0, rows(&other, 0), true, Logits::Last),
        window(0, 0, rows(&ids[..80], 0), true, Logits::All),
    ];
    assert_eq!(qwen.step(&steps).unwrap(), 81);
    assert!(logits(&mut qwen, 81)[1..] == expected[..80]);
    commit(&mut qwen, 0, 80, &ids[80..], 3);
    let together = qwen.draft(&[ask(1, 40, 5, 0, 2), ask(0, ids.len(), 700, 0, 4)]).unwrap();
    assert_eq!(together[1], drafted);
    assert_eq!(together[0], qwen.draft(&[ask(1, 40, 5, 0, 2)]).unwrap()[0]);
}

#[test]
fn kept_rows_equal_stepped_rows() {
    On::ALL.into_iter().for_each(kept_rows);
}

fn kept_rows(on: On) {
    let ids = text("tiny-a");
    let mut plain = open_fixture(on, "tiny-a", settings());
    let mut qwen = open_fixture(on, "tiny-a", settings());
    let at = 50;
    commit(&mut qwen, 1, 0, &ids[..at], 50);
    // A tree: the true tokens are rows 0, 2, 3; rows 1 and 4 are wrong guesses beside them.
    let tokens = [ids[at], 9, ids[at + 1], ids[at + 2], 11];
    let depths = [0, 1, 1, 2, 2];
    let row = |(token, depth): (u32, usize)| Row { token: Some(token), position: [(at + depth) as u32; 3] };
    let tree = Window {
        parents: Some(vec![None, Some(0), Some(0), Some(2), Some(2)]),
        ..window(1, at, tokens.into_iter().zip(depths).map(row).collect(), false, Logits::All)
    };
    assert_eq!(qwen.step(std::slice::from_ref(&tree)).unwrap(), 5);
    let found = logits(&mut qwen, 5);
    let expected = commit(&mut plain, 0, 0, &ids, 1);
    for (row, index) in [(0, at), (2, at + 1), (3, at + 2)] {
        assert!(found[row] == expected[index], "row {row}");
    }
    assert!(found[1] != expected[at + 1]);
    qwen.keep(SlotId(1), &[0, 2, 3]).unwrap();
    // A window nothing is kept of, one kept in part, one kept whole, with drafts between them.
    let chain = |start: usize, tokens: &[u32]| window(1, start, rows(tokens, start), false, Logits::All);
    qwen.step(&[chain(at + 3, &[1, 2, 3])]).unwrap();
    qwen.keep(SlotId(1), &[]).unwrap();
    draft(&mut qwen, 1, at + 3, ids[at + 3]);
    qwen.step(&[chain(at + 3, &[ids[at + 3], ids[at + 4], 8])]).unwrap();
    assert!(logits(&mut qwen, 2) == expected[at + 3..at + 5]);
    qwen.keep(SlotId(1), &[0, 1]).unwrap();
    qwen.step(&[chain(at + 5, &ids[at + 5..at + 9])]).unwrap();
    qwen.keep(SlotId(1), &[0, 1, 2, 3]).unwrap();
    draft(&mut qwen, 1, at + 9, 77);
    // A window that was never kept is forgotten.
    qwen.step(&[chain(at + 9, &[4, 4])]).unwrap();
    assert!(commit(&mut qwen, 1, at + 9, &ids[at + 9..], 10) == expected[at + 9..]);
    // The MTP layer's rows are those of the plain way as well.
    assert_eq!(draft(&mut qwen, 1, ids.len(), 700), draft(&mut plain, 0, ids.len(), 700));
}

#[test]
fn the_mtp_layer_keeps_up_without_drafts() {
    On::ALL.into_iter().for_each(keeping_up);
}

fn keeping_up(on: On) {
    let ids: Vec<u32> = text("tiny-a").into_iter().cycle().take(160).collect();
    let mut whole = open_fixture(on, "tiny-a", settings());
    commit(&mut whole, 0, 0, &ids, 100);
    let expected = draft(&mut whole, 0, ids.len(), 3);
    // More decoded tokens than the host queues, and rows_max below a queue and its window together.
    let small = Settings { rows_max: 40, logits_rows_max: 40, ..settings() };
    let mut qwen = open_fixture(on, "tiny-a", small);
    commit(&mut qwen, 0, 0, &ids[..120], 1);
    for start in (120..150).step_by(10) {
        qwen.step(&[window(0, start, rows(&ids[start..start + 10], start), false, Logits::None)]).unwrap();
        qwen.keep(SlotId(0), &(0..10).collect::<Vec<_>>()).unwrap();
    }
    commit(&mut qwen, 1, 0, &ids[..35], 1);
    commit(&mut qwen, 0, 150, &ids[150..], 10);
    assert_eq!(draft(&mut qwen, 0, ids.len(), 3), expected);
    for (at, id) in ids[35..60].iter().enumerate() {
        commit(&mut qwen, 1, 35 + at, &[*id], 1);
    }
    let mut fresh = open_fixture(on, "tiny-a", settings());
    commit(&mut fresh, 1, 0, &ids[..60], 60);
    assert_eq!(draft(&mut qwen, 1, 60, 3), draft(&mut fresh, 1, 60, 3));
}

#[test]
fn where_no_drafts_are_expected_they_are_made_from_the_last_page() {
    On::ALL.into_iter().for_each(unexpected);
}

fn unexpected(on: On) {
    let ids: Vec<u32> = text("tiny-a").into_iter().cycle().take(160).collect();
    let mut qwen = open_fixture(on, "tiny-a", settings());
    let expected = commit(&mut qwen, 0, 0, &ids, 100);
    // The same rows are forgotten in whatever windows the sequence came: those before index 128.
    let mut known: Option<Draft> = None;
    for chunk in [1, 50, 100] {
        qwen.load(SlotId(1), None).unwrap();
        qwen.expect_drafts(SlotId(1), false).unwrap();
        assert!(commit(&mut qwen, 1, 0, &ids, chunk) == expected, "chunks of {chunk}");
        let drafted = draft(&mut qwen, 1, ids.len(), 3);
        assert_eq!(drafted.tokens.len(), 4);
        assert_eq!(*known.get_or_insert_with(|| drafted.clone()), drafted, "chunks of {chunk}");
    }
    // A window that is kept, a snapshot, and one that went through bytes.
    qwen.load(SlotId(1), None).unwrap();
    qwen.expect_drafts(SlotId(1), false).unwrap();
    commit(&mut qwen, 1, 0, &ids[..120], 60);
    qwen.step(&[window(1, 120, rows(&ids[120..130], 120), false, Logits::None)]).unwrap();
    qwen.keep(SlotId(1), &(0..10).collect::<Vec<_>>()).unwrap();
    qwen.save(SlotId(1), SnapshotId(1)).unwrap();
    let bytes = qwen.export_snapshot(SnapshotId(1)).unwrap();
    qwen.import_snapshot(SnapshotId(0), &bytes).unwrap();
    for id in [0, 1] {
        qwen.load(SlotId(1), Some(SnapshotId(id))).unwrap();
        commit(&mut qwen, 1, 130, &ids[130..], 7);
        assert_eq!(Some(draft(&mut qwen, 1, ids.len(), 3)), known, "snapshot {id}");
    }
    let mut wrong = bytes;
    wrong[24] = 3;
    assert!(qwen.import_snapshot(SnapshotId(0), &wrong).is_err(), "page 3 is behind the pending row");
}

#[test]
fn drafts_report_probabilities_and_stop_when_in_doubt() {
    On::ALL.into_iter().for_each(doubt);
}

fn doubt(on: On) {
    let ids = text("tiny-a");
    let mut qwen = open_fixture(on, "tiny-a", settings());
    assert_eq!(draft(&mut qwen, 0, 0, 5), Draft::default(), "nothing is known of an empty sequence");
    commit(&mut qwen, 0, 0, &ids, 91);
    let all = draft(&mut qwen, 0, ids.len(), 700);
    assert_eq!((all.tokens.len(), all.probabilities.len(), all.first.len()), (4, 4, 3));
    assert_eq!(all.first[0], (all.tokens[0], all.probabilities[0]));
    assert!(all.first[1].1 >= all.first[2].1 && all.first[0].1 >= all.first[1].1);
    assert!(all.probabilities.iter().all(|p| *p > 0.0 && *p <= 1.0));
    // A bar just above the least likely token ends the chain before it.
    let least = all.probabilities.iter().copied().fold(1.0, f32::min);
    let before = all.probabilities.iter().position(|p| *p == least).unwrap();
    let doubt = model::DraftAsk { confidence: least * 1.001, ..ask(0, ids.len(), 700, 0, 4) };
    let cut = qwen.draft(std::slice::from_ref(&doubt)).unwrap().remove(0);
    let sure = all.probabilities.iter().position(|p| *p < least * 1.001).unwrap();
    assert!(sure <= before);
    assert_eq!(cut.tokens, all.tokens[..sure]);
    let never = model::DraftAsk { confidence: 1.1, ..doubt };
    assert_eq!(qwen.draft(&[never]).unwrap(), [Draft::default()]);
    // A mask holds for the first token, and sampled drafts use the target's keys.
    let mut masked = ask(0, ids.len(), 700, 0, 2);
    let mut bits = vec![0u32; 2048 / 32];
    bits[1] = 1 << 3;
    masked.draw.mask = Some(bits);
    assert_eq!(qwen.draft(&[masked]).unwrap()[0].tokens[0], 35);
    let mut sampled = ask(0, ids.len(), 700, 0, 4);
    sampled.draw.temperature = 1.5;
    let one = qwen.draft(std::slice::from_ref(&sampled)).unwrap();
    assert_eq!(one, qwen.draft(std::slice::from_ref(&sampled)).unwrap());
    sampled.draw.seed += 1;
    assert_ne!(one, qwen.draft(&[sampled]).unwrap());
}

#[test]
fn snapshots_resume_here_and_elsewhere() {
    On::ALL.into_iter().for_each(snapshots);
}

fn snapshots(on: On) {
    let ids = text("tiny-a");
    let at = 64;
    let mut qwen = open_fixture(on, "tiny-a", settings());
    commit(&mut qwen, 0, 0, &ids[..at - 2], 30);
    commit(&mut qwen, 0, at - 2, &ids[at - 2..at], 1);
    qwen.save(SlotId(0), SnapshotId(1)).unwrap();
    let snapshot = qwen.export_snapshot(SnapshotId(1)).unwrap();
    let page = qwen.export_page(pages(0)[0]).unwrap();
    let expected = commit(&mut qwen, 0, at, &ids[at..], 9);
    let drafted = draft(&mut qwen, 0, ids.len(), 12);
    qwen.load(SlotId(0), Some(SnapshotId(1))).unwrap();
    assert!(commit(&mut qwen, 0, at, &ids[at..], 27) == expected);
    assert_eq!(draft(&mut qwen, 0, ids.len(), 12), drafted);

    let mut other = open_fixture(on, "tiny-a", settings());
    other.import_page(pages(2)[0], &page).unwrap();
    other.import_snapshot(SnapshotId(0), &snapshot).unwrap();
    assert_eq!(other.export_snapshot(SnapshotId(0)).unwrap(), snapshot);
    assert_eq!(other.export_page(pages(2)[0]).unwrap(), page);
    other.load(SlotId(2), Some(SnapshotId(0))).unwrap();
    assert!(commit(&mut other, 2, at, &ids[at..], 27) == expected);
    assert_eq!(draft(&mut other, 2, ids.len(), 12), drafted);
}

#[test]
fn damaged_snapshots_are_refused() {
    On::ALL.into_iter().for_each(damage);
}

fn damage(on: On) {
    let mut qwen = open_fixture(on, "tiny-a", settings());
    commit(&mut qwen, 0, 0, &[1, 2, 3], 3);
    qwen.save(SlotId(0), SnapshotId(0)).unwrap();
    let bytes = qwen.export_snapshot(SnapshotId(0)).unwrap();
    let mut damaged = vec![bytes[..bytes.len() - 1].to_vec(), Vec::new(), bytes[..23].to_vec()];
    damaged.push([&bytes[..], &[0]].concat());
    // Byte 7 is the format: an older one is refused.
    for (at, value) in [(0, b'x'), (7, b'1'), (8, 0), (14, 1), (16, 0), (16, 2), (20, 5), (24, 1)] {
        let mut copy = bytes.clone();
        copy[at] = value;
        damaged.push(copy);
    }
    for bytes in &damaged {
        assert!(qwen.import_snapshot(SnapshotId(1), bytes).is_err());
        assert!(qwen.load(SlotId(1), Some(SnapshotId(1))).is_err(), "nothing was saved there");
    }
    let mut without = open_fixture(on, "tiny-a", Settings { mtp: false, ..settings() });
    assert!(without.import_snapshot(SnapshotId(0), &bytes).is_err(), "it has MTP state");
    assert!(qwen.import_page(0, &[0; 7]).is_err());
    assert!(qwen.import_page(0, &[]).is_err());
}

#[test]
fn without_mtp_there_are_no_drafts_and_the_same_logits() {
    On::ALL.into_iter().for_each(no_mtp);
}

fn no_mtp(on: On) {
    let ids = text("tiny-a");
    let mut with = open_fixture(on, "tiny-a", settings());
    let mut without = open_fixture(on, "tiny-a", Settings { mtp: false, ..settings() });
    assert!(!without.spec().has_mtp);
    assert!(commit(&mut without, 0, 0, &ids, 20) == commit(&mut with, 0, 0, &ids, 40));
    assert_eq!(draft(&mut without, 0, ids.len(), 4), Draft::default());
    let step = window(0, ids.len(), rows(&[1, 2], ids.len()), false, Logits::None);
    without.step(&[step]).unwrap();
    without.keep(SlotId(0), &[0]).unwrap();
    without.save(SlotId(0), SnapshotId(0)).unwrap();
    let bytes = without.export_snapshot(SnapshotId(0)).unwrap();
    without.import_snapshot(SnapshotId(1), &bytes).unwrap();
    without.load(SlotId(0), Some(SnapshotId(1))).unwrap();
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mut qwen = open_fixture(On::Reference, "tiny-a", settings());
    let good = || window(0, 0, rows(&[1, 2, 3], 0), true, Logits::Last);
    let row = Row { token: Some(1), position: [0; 3] };
    let cases = [
        (Window { slot: SlotId(3), ..good() }, "slot: 3 found, below 3 expected"),
        (Window { start: 1, ..good() }, "start of a window: 1 found, 0 expected"),
        (Window { rows: vec![], ..good() }, "rows of a step: 0 found, 1 to 128 expected"),
        (Window { rows: vec![row; 129], ..good() }, "rows of a step: 129 found, 1 to 128 expected"),
        (Window { rows: vec![row; 257], ..good() }, "tokens of a sequence: 257 found, at most 256 expected"),
        (Window { pages: vec![16], ..good() }, "page: 16 found, below 16 expected"),
        (Window { pages: vec![], ..good() }, "window 0: 0 pages for 3 tokens"),
        (
            Window { rows: vec![Row { token: Some(2048), ..row }], ..good() },
            "token: 2048 found, below 2048 expected",
        ),
        (
            Window { rows: vec![Row { position: [0, 256, 0], ..row }], ..good() },
            "rotary position: 256 found, below 256 expected",
        ),
        (
            Window { rows: vec![Row { token: None, ..row }], ..good() },
            "step row without a token: 0 found, its embedding beside it expected",
        ),
        (
            Window { rows: vec![row; 33], commit: false, ..good() },
            "window 0: 33 uncommitted rows, at most 32",
        ),
    ];
    for (window, message) in cases {
        assert_eq!(qwen.step(&[window]).unwrap_err().to_string(), message);
    }
    assert!(qwen.step(&[good(), good()]).is_err(), "one slot twice");
    assert!(qwen.step_with(&[good()], &[(0, vec![0.0; 64])], &mut model::qwen3_5::Unprobed).is_err());
    assert!(qwen.draw(&[greedy(0, 0)]).is_err(), "no logits yet");
    qwen.step(&[good()]).unwrap();
    assert!(qwen.draw(&[greedy(1, 0)]).is_err());
    assert!(qwen.read_logits(0, &mut [0.0; 3]).is_err());
    assert!(qwen.keep(SlotId(0), &[]).is_err(), "nothing open");
    qwen.step(&[window(0, 3, rows(&[4, 5], 3), false, Logits::None)]).unwrap();
    assert!(qwen.keep(SlotId(0), &[1]).is_err(), "not a path");
    for bad in [ask(0, 2, 1, 0, 1), ask(0, 3, 1, 0, 9), ask(0, 3, 2048, 0, 1), ask(3, 3, 1, 0, 1)] {
        assert!(qwen.draft(&[bad]).is_err());
    }
    assert!(qwen.draft(&[ask(0, 3, 1, 0, 1), ask(0, 3, 1, 0, 1)]).is_err());
    assert!(qwen.load(SlotId(0), Some(SnapshotId(0))).is_err(), "never saved");
    assert!(qwen.save(SlotId(0), SnapshotId(2)).is_err());
    assert!(qwen.export_page(16).is_err());
}

/// At the end of the context the chain gets shorter instead of leaving it.
#[test]
fn drafts_end_with_the_context() {
    let mut qwen = open_fixture(On::Reference, "tiny-a", Settings { context: 20, pages: 12, ..settings() });
    commit(&mut qwen, 0, 0, &[7; 17], 17);
    assert_eq!(draft(&mut qwen, 0, 17, 1).tokens.len(), 3);
    commit(&mut qwen, 0, 17, &[7; 3], 3);
    assert_eq!(draft(&mut qwen, 0, 20, 1).tokens.len(), 0);
}
