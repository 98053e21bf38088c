//! Pictures from files, and the questions about them that the demo model brings.

use crate::{clary, clary_with, demo, project};

fn picture() -> String {
    project("models/demo/eval/images/dev-280-0.png")
}

#[test]
fn a_picture_is_shown_as_the_model_sees_it() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("seen.png");
    let (picture, model, seen) = (picture(), demo(), out.display().to_string());
    clary(&["image", &picture, "--model", &model, "--out", &seen]).code(0).out_has("tokens   9");
    let again = clary(&["image", &seen, "--model", &model, "--json"]).code(0).json();
    assert_eq!((&again["tokens"], &again["grid"]), (&9.into(), &serde_json::json!([1, 6, 6])));
    let first = clary(&["image", &picture, "--model", &model, "--json"]).code(0).json();
    assert_eq!(again["sha256"], first["sha256"], "the model sees the same again");
    clary(&["image", &picture, "--model", "models/none"]).code(3).err_has("no such folder").err_has("hint: ");
    clary(&["image", &project("README.md")]).code(2).err_has("not a picture");
}

#[test]
fn questions_about_a_picture_are_answered() {
    let (model, picture) = (demo(), picture());
    let words = "What is in the picture, and how many?";
    let plain = ["--thinking", "off", "--temperature", "0"];
    let run = ["run", &model, words, "--image", &picture];
    clary(&[&run[..], &plain].concat()).code(0).out_has("There are 6 green crosses.");
    let input = format!("/image {picture}\n{words}\n");
    clary_with(&[&["chat", &model][..], &plain].concat(), &input).code(0).out_has("6 green crosses.");
    let readme = project("README.md");
    let ran = clary(&["run", &model, words, "--image", &picture, "--image", &readme]).code(2);
    ran.err_has("README.md: the bytes are not a picture").err_has("PNG, JPEG, WebP and GIF");
    let off = clary(&[&run[..], &["--vision", "off"]].concat()).code(2);
    off.err_has("pictures are not supported by this model as it is loaded");
}

/// A set of one's own: what is wrong with it is named, in a line.
#[test]
fn mistakes_in_a_set_of_questions_are_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let link = "data:image/png;base64,".to_owned() + &"A".repeat(2_000);
    for (url, most, wanted) in [
        (link.as_str(), 9, "a file of the set is expected, not a URL"),
        ("https://example.com/a.png", 9, "a file of the set is expected, not a URL"),
        ("../a.png", 9, "does not lie in the set's folder"),
        ("a.png", 0, "max_tokens: a number from 1 expected, not 0"),
    ] {
        let line = serde_json::json!({"id": "a", "kind": "k", "enable_thinking": false, "max_tokens": most,
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
            "check": {"type": "exact", "expected": "x"}});
        std::fs::write(dir.path().join("items.jsonl"), format!("{line}\n")).expect("writable");
        let set = dir.path().display().to_string();
        let ran = clary(&["eval", "vision", &demo(), "--set", &set, "--streams", "1"]).code(2);
        assert!(ran.err.contains(wanted) && ran.err.len() < 400, "{ran:#?}");
    }
}

/// 60 of 61 in every arrangement, with one hash. The other one asks whether two pictures are alike: the
/// float64 reference device gives the same wrong answer with these weights.
#[test]
fn pictures_are_answered_alike_in_company_and_drafted() {
    let report = clary(&["eval", "vision", &demo(), "--least", "60", "--json"]).code(0).json();
    assert_eq!((&report["questions"], &report["equal"]), (&61.into(), &true.into()), "{report}");
    let runs = report["runs"].as_array().expect("a list");
    assert_eq!(runs.len(), 4, "{report}");
    clary(&["eval", "vision", &demo(), "--streams", "8", "--least", "62"]).code(8).err_has("at least 62");
}
