//! A few seconds of mixed load on the real binary.

use crate::serve::Server;
use crate::{clary, demo};

#[test]
fn a_short_soak_of_a_model_and_of_a_server() {
    let ran = clary(&[
        "soak",
        &demo(),
        "--streams",
        "4",
        "--minutes",
        "0.05",
        "--ctx",
        "1024",
        "--seed",
        "3",
        "--json",
    ]);
    let ran = ran.code(0);
    let document = ran.json();
    assert_eq!((&document["failures"], &document["busy_at_end"]), (&0.into(), &0.into()), "{document}");
    for count in ["finished", "pictures", "image_tokens", "left", "generated_tokens", "memory_bytes"] {
        assert!(document[count].as_u64() > Some(0), "{count}: {document}");
    }
    let server = Server::start("1024", &["--slots", "2"]);
    let url = format!("http://{}", server.address);
    clary(&["soak", "--url", &url, "--minutes", "0.02"]).code(0).out_has("failures");
}

#[test]
fn failures_are_failures_of_the_command() {
    // Most of so many requests find the queue full.
    let server = Server::start("1024", &["--slots", "1", "--queue", "1"]);
    let url = format!("http://{}", server.address);
    clary(&["soak", "--url", &url, "--minutes", "0.02", "--streams", "8"]).code(1).out_has("queue_full");
    clary(&["soak"]).code(2);
    clary(&["soak", &demo(), "--url", &url]).code(2);
    clary(&["soak", "no/such/model", "--minutes", "0.01"]).code(3).err_has("did not start");
}
