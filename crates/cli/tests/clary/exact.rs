//! `eval exact`.

use crate::{clary, project};

#[test]
fn every_contract_holds_on_a_small_model() {
    let tiny = project("fixtures/tiny-b");
    let args = ["eval", "exact", &tiny, "--streams", "1,2,3", "--threads", "2"];
    let json = clary(&[&args[..], &["--json"]].concat()).code(0).json();
    assert_eq!(json["held"], true);
    assert_eq!(json["streams"], serde_json::json!([1, 2, 3]));
    assert_eq!(json["not_run"][0]["id"], "E4");
    let rows = json["contracts"].as_array().unwrap();
    for id in ["E1", "E2", "E3", "E5", "E6", "E7", "E8", "E9"] {
        let row = rows.iter().find(|row| row["id"] == id).unwrap_or_else(|| panic!("{id}: {json:#}"));
        assert!(row["held"] == true && row["compared"].as_u64() > Some(0), "{row}");
        assert!(row["difference"].is_null(), "{row}");
    }
}

#[test]
fn what_is_outside_the_contracts_is_refused() {
    let tiny = project("fixtures/tiny-b");
    clary(&["eval", "exact", &tiny, "--device", "reference"]).code(2).err_has("outside the contracts");
    clary(&["eval", "exact", &tiny, "--streams", "0"]).code(2).err_has("from 1 to 32");
    clary(&["eval", "exact", "no/such/folder"]).code(3);
    clary(&["eval", "exact", &tiny, "--memory-limit", "1MiB"]).code(4).err_has("would fit");
    clary(&["eval"]).code(2);
}
