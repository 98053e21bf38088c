//! What a step uploads.

use super::super::memory::{StepShape, UPLOAD_BYTES, Upload};
use crate::{Row, Step, Window};

fn rows(count: usize) -> Vec<Row> {
    (0..count as u32)
        .map(|i| Row { token: (i != 1).then_some(100 + i), position: [i, 2 * i, 3 * i] })
        .collect()
}

fn step() -> Step {
    let chain =
        Window { place: 7, first: 0, rows: 2, start: 63, pages: vec![9, 4, 8], parents: None, commit: true };
    let parents = Some(vec![None, Some(0), Some(0), Some(1)]);
    let tree = Window { place: 3, first: 2, rows: 4, start: 10, pages: vec![5], parents, commit: false };
    Step::new(rows(6), vec![chain, tree]).expect("valid")
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

#[test]
fn rows_windows_and_pages_are_laid_out_as_the_kernels_read_them() {
    let mut upload = Upload::default();
    let places = upload.open(&step()).expect("fits");
    let span = upload.push_words(&[11, 12]);
    let mut bytes = vec![0; UPLOAD_BYTES];
    let end = upload.write(&mut bytes);
    let base = 0x1000;
    let [rows, windows, pages, counts] = upload.addresses(places, base).words();
    assert_eq!((rows, counts), (base, 6 | 2 << 32));
    let row = |at: usize| words(&bytes[48 * at..][..48]);
    let none = u32::MAX;
    // Token, position, window, row, index, storage, parent, ancestors.
    assert_eq!(row(0), [100, 0, 0, 0, 0, 0, 63, 63, none, 1, 0, 0]);
    assert_eq!(row(1), [none, 1, 2, 3, 0, 1, 64, 64, 0, 3, 0, 0]);
    assert_eq!(row(2), [102, 2, 4, 6, 1, 0, 10, 10, none, 1, 0, 0]);
    assert_eq!(row(4), [104, 4, 8, 12, 1, 2, 11, 12, 0, 5, 0, 0]);
    assert_eq!(row(5), [105, 5, 10, 15, 1, 3, 12, 13, 1, 11, 0, 0]);
    let table = words(&bytes[(windows - base) as usize..][..64]);
    // Place, first, rows, start, commit, tree, first page, pages.
    assert_eq!(table, [7, 0, 2, 63, 1, 0, 0, 2, 3, 2, 4, 10, 0, 1, 2, 1]);
    assert_eq!(words(&bytes[(span.address(base) - base) as usize..][..8]), [11, 12]);
    assert_eq!(words(&bytes[(pages - base) as usize..end]), [9, 4, 5]);
    assert!([windows, span.address(base), pages].iter().all(|address| address.is_multiple_of(16)));
}

#[test]
fn the_shape_says_what_launches_depend_on() {
    let shape = StepShape::of(&step());
    assert_eq!((shape.rows, shape.windows, shape.window_rows, shape.spans), (6, 2, 4, 1));
    assert!(shape.tree && shape.some_commit && shape.some_open);
    let long =
        Window { place: 0, first: 0, rows: 1, start: 1100, pages: vec![0; 18], parents: None, commit: true };
    let shape = StepShape::of(&Step::new(rows(1), vec![long]).expect("valid"));
    // 1101 keys are three spans of 512.
    assert_eq!((shape.spans, shape.tree, shape.some_open), (4, false, false));
}

#[test]
fn steps_beyond_the_tables_are_refused() {
    let long = |rows: usize, pages: usize, start: usize| {
        let window =
            Window { place: 0, first: 0, rows, start, pages: vec![0; pages], parents: None, commit: true };
        let rows = vec![Row { token: None, position: [0; 3] }; rows];
        Upload::default().open(&Step::new(rows, vec![window]).expect("valid")).map(drop)
    };
    let error = long(20_000, 320, 0).expect_err("too many rows").to_string();
    assert!(error.contains("20000 rows"), "{error}");
    let pages = UPLOAD_BYTES / 4 + 1;
    let error = long(1, pages, 64 * pages - 1).expect_err("too many pages").to_string();
    assert!(error.contains("tables"), "{error}");
}
