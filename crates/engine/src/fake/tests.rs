use model::Row;

use super::*;

fn window(start: usize, tokens: &[u32], pages: &[u32], commit: bool, logits: Logits) -> Window {
    let row = |(at, &token): (usize, &u32)| Row { token: Some(token), position: [(start + at) as u32; 3] };
    let rows = tokens.iter().enumerate().map(row).collect();
    Window { slot: SlotId(0), start, rows, pages: pages.to_vec(), parents: None, commit, logits }
}

fn expected(tokens: &[u32]) -> Vec<f32> {
    let mut history = History::default();
    tokens.iter().enumerate().for_each(|(at, &token)| history.push(token, [at as u32; 3], None));
    let mut logits = Vec::new();
    history.logits(64, &mut logits);
    logits
}

fn last_logits(model: &mut FakeModel, row: usize) -> Vec<f32> {
    let mut out = vec![0.0; 64];
    model.read_logits(row, &mut out).expect("a row");
    out
}

#[test]
fn windows_equal_the_definition_and_page_order_matters() {
    let tokens: Vec<u32> = (0..100).map(|at| at * 7 % 64).collect();
    let mut model = FakeModel::new(FakeConfig::default());
    model.step(&[window(0, &tokens[..70], &[5, 9], true, Logits::None)]).expect("fits");
    model.step(&[window(70, &tokens[70..], &[5, 9], true, Logits::Last)]).expect("fits");
    assert_eq!(last_logits(&mut model, 0), expected(&tokens));
    model.load(SlotId(0), None).expect("a slot");
    model.step(&[window(0, &tokens[..70], &[5, 9], true, Logits::None)]).expect("fits");
    model.step(&[window(70, &tokens[70..], &[9, 5], true, Logits::Last)]).expect("fits");
    assert_ne!(last_logits(&mut model, 0), expected(&tokens), "swapped pages");
}

#[test]
fn kept_paths_of_trees_equal_chains() {
    let mut model = FakeModel::new(FakeConfig::default());
    model.step(&[window(0, &[1, 2], &[3], true, Logits::None)]).expect("fits");
    let mut tree = window(2, &[4, 5, 6, 7], &[3], false, Logits::All);
    tree.parents = Some(vec![None, Some(0), Some(0), Some(2)]);
    for (row, input) in tree.rows.iter_mut().enumerate() {
        input.position = [2 + [0, 1, 1, 2][row]; 3];
    }
    assert_eq!(model.step(&[tree]).expect("fits"), 4);
    assert_eq!(last_logits(&mut model, 3), expected(&[1, 2, 4, 6, 7]));
    assert!(model.save(SlotId(0), SnapshotId(0)).is_err(), "a window waits");
    assert!(model.keep(SlotId(0), &[0, 3]).is_err(), "not a path");
    model.load(SlotId(0), None).expect("a slot");
    model.step(&[window(0, &[1, 2], &[3], true, Logits::None)]).expect("fits");
    let mut tree = window(2, &[4, 5, 6], &[3], false, Logits::All);
    tree.parents = Some(vec![None, Some(0), Some(0)]);
    tree.rows[2].position = [3; 3];
    model.step(&[tree]).expect("fits");
    model.keep(SlotId(0), &[0, 2]).expect("a path");
    model.step(&[window(4, &[9], &[3], true, Logits::Last)]).expect("fits");
    assert_eq!(last_logits(&mut model, 0), expected(&[1, 2, 4, 6, 9]));
}

#[test]
fn snapshots_and_pages_travel_as_bytes() {
    let mut model = FakeModel::new(FakeConfig::default());
    model.step(&[window(0, &[1, 2, 3], &[0], true, Logits::None)]).expect("fits");
    model.save(SlotId(0), SnapshotId(1)).expect("idle");
    let (state, page) = (model.export_snapshot(SnapshotId(1)), model.export_page(0));
    model.import_snapshot(SnapshotId(2), &state.expect("saved")).expect("whole");
    model.import_page(7, &page.expect("a page")).expect("whole");
    model.load(SlotId(0), Some(SnapshotId(2))).expect("saved");
    model.step(&[window(3, &[4], &[7], true, Logits::Last)]).expect("fits");
    assert_eq!(last_logits(&mut model, 0), expected(&[1, 2, 3, 4]));
    assert!(model.import_page(7, &[0; 3]).is_err());
    assert!(model.load(SlotId(0), Some(SnapshotId(5))).is_err(), "never saved");
}

#[test]
fn positions_out_of_step_are_refused() {
    let mut model = FakeModel::new(FakeConfig::default());
    assert!(model.step(&[window(1, &[1], &[0], true, Logits::None)]).is_err());
    assert!(model.step(&[window(0, &[1; 65], &[0], true, Logits::None)]).is_err(), "one page is too short");
    assert!(model.step(&[window(0, &[1], &[999], true, Logits::None)]).is_err());
}
