//! Recording, lowering, replaying.

use quant::{Dtype, Encoding, Matrix, Scheme, Zero};

use super::super::Cuda;
use super::super::standin::{Event, StandIn};
use super::device;
use crate::{Buffer, DeltaShape, Device, Draw, Row, Step, VectorRef, Window};

/// A grouped matrix of zeros.
fn grouped(rows: usize, cols: usize) -> Matrix {
    let scheme = Scheme { bits: 4, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 };
    let floats = rows * cols / 64 * 2;
    let bytes = |n: usize| vec![0u8; n].into();
    Matrix::new(rows, cols, Encoding::Grouped(scheme), bytes(rows * cols / 2), bytes(floats), bytes(floats))
        .expect("valid")
}

fn step(rows: usize, start: usize) -> Step {
    let pages = vec![0; (start + rows).div_ceil(64)];
    let window = Window { place: 0, first: 0, rows, start, pages, parents: None, commit: true };
    Step::new(vec![Row { token: Some(1), position: [0; 3] }; rows], vec![window]).expect("valid")
}

fn names(events: Vec<Event>) -> Vec<String> {
    let of = |event| match event {
        Event::Launched(names) => names,
        other => vec![format!("{other:?}")],
    };
    events.into_iter().flat_map(of).collect()
}

struct Small {
    x: Buffer,
    y: Buffer,
    weight: VectorRef,
}

fn small(device: &mut dyn Device) -> Small {
    let [x, y] = [(); 2].map(|()| device.buffer(520, 64).expect("fits"));
    Small { x, y, weight: device.vector(&[1.0; 64]).expect("fits") }
}

/// A step of a norm with `rows` rows after `start` others, and what was run for it.
fn run(device: &mut Cuda, stub: &StandIn, of: &Small, rows: usize, start: usize) -> Vec<String> {
    device.begin(&step(rows, start)).expect("fits");
    device.norm(of.x, rows, of.weight, 1e-6, of.y).expect("fits");
    device.gather(of.x, &[start % 7], of.y).expect("fits");
    device.read(of.y, 0, &mut [0.0; 64]).expect("fits");
    names(stub.events())
}

#[test]
fn a_list_runs_then_is_recorded_then_replayed() {
    let (mut device, stub) = device();
    let of = small(&mut device);
    assert_eq!(run(&mut device, &stub, &of, 2, 5), ["norm_rows", "gather_rows"]);
    // Other positions and other gathered rows, but the same list.
    assert_eq!(run(&mut device, &stub, &of, 2, 6), ["Recorded(0)", "Replayed(0)"]);
    assert_eq!(run(&mut device, &stub, &of, 2, 7), ["Replayed(0)"]);
    // Other rows, other spans: other lists.
    assert_eq!(run(&mut device, &stub, &of, 3, 7), ["norm_rows", "gather_rows"]);
    assert_eq!(run(&mut device, &stub, &of, 2, 600), ["norm_rows", "gather_rows"]);
    assert_eq!(run(&mut device, &stub, &of, 2, 8), ["Replayed(0)"]);
    // So are those of short prompts.
    assert_eq!(run(&mut device, &stub, &of, 100, 0), ["norm_rows_many", "gather_rows"]);
    assert_eq!(run(&mut device, &stub, &of, 100, 0), ["Recorded(1)", "Replayed(1)"]);
    assert_eq!(run(&mut device, &stub, &of, 100, 3), ["Replayed(1)"]);
    // A long prompt's list is kept but not recorded.
    assert_eq!(run(&mut device, &stub, &of, 513, 0), ["norm_rows_many", "gather_rows"]);
    assert_eq!(run(&mut device, &stub, &of, 513, 0), ["norm_rows_many", "gather_rows"]);
}

#[test]
fn few_prompts_stay_recorded() {
    let (mut device, stub) = device();
    let of = small(&mut device);
    for rows in [2].into_iter().chain(65..98) {
        run(&mut device, &stub, &of, rows, 0);
        let recorded = run(&mut device, &stub, &of, rows, 0);
        // The 33rd prompt takes the graph of the first.
        assert_eq!(recorded.contains(&"Freed(1)".to_owned()), rows == 97, "{rows}: {recorded:?}");
    }
    assert_eq!(run(&mut device, &stub, &of, 2, 0), ["Replayed(0)"]);
    assert_eq!(run(&mut device, &stub, &of, 66, 0), ["Replayed(2)"]);
    // Its list is still there, to be recorded again.
    assert_eq!(run(&mut device, &stub, &of, 65, 0), ["Recorded(34)", "Replayed(34)", "Freed(3)"]);
}

#[test]
fn nothing_runs_before_the_host_looks() {
    let (mut device, stub) = device();
    let of = small(&mut device);
    device.write(of.x, 0, &[1.0; 64]).expect("fits");
    device.norm(of.x, 1, of.weight, 1e-6, of.y).expect("fits");
    assert_eq!(stub.events(), []);
    device.begin(&step(1, 0)).expect("fits");
    assert_eq!(names(stub.events()), ["copy_values", "norm_rows"]);
}

#[test]
fn norms_write_the_codes_that_the_next_matrix_reads() {
    let (mut device, stub) = device();
    let of = small(&mut device);
    let matrix = device.matrix(&grouped(64, 64)).expect("fits");
    let out = device.buffer(128, 64).expect("fits");
    device.norm(of.x, 2, of.weight, 1e-6, of.y).expect("fits");
    device.linear(of.y, 2, &[(matrix, out)]).expect("fits");
    // More rows than were normed: the codes are made again.
    device.linear(of.y, 3, &[(matrix, out)]).expect("fits");
    // A plane that no stage with codes wrote.
    device.linear(of.x, 2, &[(matrix, out)]).expect("fits");
    device.read(out, 0, &mut [0.0; 64]).expect("fits");
    let expected = ["norm_rows", "linear", "quantize_rows", "linear", "quantize_rows", "linear"];
    let found = names(stub.events());
    let found: Vec<&str> =
        found.iter().map(|name| if name.starts_with("linear") { "linear" } else { name }).collect();
    assert_eq!(found, expected);
}

#[test]
fn rows_of_prompts_leave_the_norms_as_aligned_codes() {
    let (mut device, stub) = device();
    let of = small(&mut device);
    let matrix = device.matrix(&grouped(64, 64)).expect("fits");
    let out = device.buffer(128, 64).expect("fits");
    for _ in 0..2 {
        device.norm(of.x, 70, of.weight, 1e-6, of.y).expect("fits");
        device.linear(of.y, 70, &[(matrix, out)]).expect("fits");
        device.linear(of.y, 66, &[(matrix, out)]).expect("fits");
    }
    // A plane that no stage with codes wrote, twice.
    device.linear(of.x, 70, &[(matrix, out)]).expect("fits");
    device.linear(of.x, 70, &[(matrix, out)]).expect("fits");
    device.read(out, 0, &mut [0.0; 64]).expect("fits");
    let product = ["linear_warpgroup", "linear_prompt"];
    let normed = [&["norm_rows_many"][..], &product, &product].concat();
    let made = [&["quantize_rows", "align_rows"][..], &product, &product].concat();
    assert_eq!(names(stub.events()), [&normed[..], &normed, &made].concat());
}

#[test]
fn experts_are_mixed_in_the_launch_of_the_norm_after_them() {
    let (mut device, stub) = device();
    let of = small(&mut device);
    let picks = device.picks(4, 2).expect("fits");
    let [routed, shared, update] = [8, 4, 4].map(|rows| device.buffer(rows, 64).expect("fits"));
    let gate = device.buffer(4, 1).expect("fits");
    device.combine(routed, picks, shared, gate, 2, update).expect("fits");
    device.add_norm(of.x, update, 2, of.weight, 1e-6, of.y).expect("fits");
    // Another number of rows is another sum.
    device.combine(routed, picks, shared, gate, 2, update).expect("fits");
    device.add_norm(of.x, update, 1, of.weight, 1e-6, of.y).expect("fits");
    device.read(of.y, 0, &mut [0.0; 64]).expect("fits");
    assert_eq!(names(stub.events()), ["norm_rows", "combine_rows", "norm_rows"]);
}

#[test]
fn the_oldest_lists_go_first() {
    let (mut device, stub) = device();
    let of = small(&mut device);
    for start in [5, 6] {
        run(&mut device, &stub, &of, 1, start);
    }
    for (row, rows) in (0..100).flat_map(|row| [1, 2, 3].map(|rows| (row, rows))) {
        device.begin(&step(1, 0)).expect("fits");
        device.write(of.x, row, &vec![0.0; 64 * rows]).expect("fits");
        device.read(of.x, 0, &mut [0.0]).expect("fits");
    }
    assert!(names(stub.events()).contains(&"Freed(0)".to_owned()));
    assert_eq!(run(&mut device, &stub, &of, 1, 5), ["norm_rows", "gather_rows"]);
}

#[test]
fn uploads_that_do_not_fit_together_go_in_turn() {
    let (mut device, stub) = device();
    let wide = device.buffer(64, 1 << 16).expect("fits");
    // 64 rows of 256 KiB are more than one upload.
    for row in 0..64 {
        device.write(wide, row, &vec![row as f64; 1 << 16]).expect("fits");
    }
    device.read(wide, 0, &mut [0.0]).expect("fits");
    let launched: usize = names(stub.events()).iter().filter(|name| *name == "copy_values").count();
    assert_eq!(launched, 64);
    // One write beyond the limit is copied at once.
    let long = device.buffer(8, 1 << 16).expect("fits");
    device.write(long, 0, &vec![2.0; 8 << 16]).expect("fits");
    let mut back = vec![0.0; 4];
    device.read(long, 7, &mut back).expect("fits");
    assert_eq!(back, [2.0; 4]);
}

/// Greedy draws of some rows.
fn draws(rows: usize) -> Vec<Draw> {
    (0..rows).map(|row| Draw::greedy(row, 9, 64)).collect()
}

#[test]
fn steps_that_take_drawn_tokens_run_in_one_list() {
    let (mut device, stub) = device();
    let of = small(&mut device);
    let table = device.matrix(&grouped(64, 64)).expect("fits");
    // Room for tokens and scratch.
    device.draw(of.y, &draws(2)).expect("runs");
    stub.events();
    let chain = |device: &mut Cuda, counts: [usize; 2]| {
        for (at, count) in counts.into_iter().enumerate() {
            device.begin(&step(1, 5 + at)).expect("fits");
            device.embed_drawn(table, &[0], of.x).expect("fits");
            device.norm(of.x, 1, of.weight, 1e-6, of.y).expect("fits");
            device.draw_later(of.y, &draws(count)).expect("fits");
        }
        assert_eq!(stub.events(), [], "nothing runs before the host looks");
        assert_eq!(device.drawn().expect("runs").len(), counts[0] + counts[1]);
        names(stub.events())
    };
    let drawn = ["draw_scores", "draw_weights", "draw_choose"];
    let later = [&["embed", "norm_rows"][..], &drawn, &["embed", "norm_rows"], &drawn].concat();
    assert_eq!(chain(&mut device, [1, 1]), later);
    assert_eq!(chain(&mut device, [1, 1]), ["Recorded(0)", "Replayed(0)"]);
    assert_eq!(chain(&mut device, [1, 1]), ["Replayed(0)"]);
    assert_eq!(chain(&mut device, [2, 1]), later, "another number of draws is another list");
    device.draw_later(of.y, &draws(1)).expect("fits");
    device.start().expect("runs");
    assert_eq!(names(stub.events()), drawn);
    assert_eq!(device.drawn().expect("ran").len(), 1);
    assert_eq!(stub.events(), []);
}

/// What a longer window keeps needs other memory: the rows before are taken over from theirs first.
#[test]
fn rows_are_kept_before_a_longer_window_takes_their_room() {
    let (mut device, stub) = device();
    let shape = DeltaShape { key_heads: 1, value_heads: 1, key_dim: 16, value_dim: 16, conv_taps: 4 };
    let pool = device.state_pool(shape, 1).expect("fits");
    let [x, mixed] = [(); 2].map(|()| device.buffer(16, shape.channels()).expect("fits"));
    let [a, b] = [(); 2].map(|()| device.buffer(16, 1).expect("fits"));
    let out = device.buffer(16, 16).expect("fits");
    let taps = device.vector(&vec![1.0; 4 * shape.channels()]).expect("fits");
    let [decay, bias] = [(); 2].map(|()| device.vector(&[1.0]).expect("fits"));
    let window = |device: &mut Cuda, rows: usize| {
        let step = step(rows, 5);
        let windows = step.windows().iter().map(|window| Window { commit: false, ..window.clone() });
        let open = Step::new(step.rows().to_vec(), windows.collect()).expect("valid");
        device.begin(&open).expect("fits");
        device.conv(x, taps, pool, mixed).expect("fits");
        device.delta_rule(mixed, a, b, decay, bias, pool, out).expect("fits");
    };
    for (rows, waits) in [(4, true), (8, true), (10, false), (12, true), (4, true)] {
        stub.events();
        window(&mut device, rows);
        let kept = names(stub.events()).contains(&"state_keep".to_owned());
        assert_eq!(kept, !waits, "rows of the window before, at a window of {rows}");
        device.read(out, 0, &mut [0.0]).expect("runs");
        device.state_keep(pool, 0, &[0, 1]).expect("fits");
    }
}
