//! Pictures that claim 200 megapixels cost no memory, whichever way they lie.

use serde_json::json;

use crate::support::{Server, Setup};
use crate::{alone, made, resident};

/// Most that resident memory may grow over all of them.
const GROWTH_MAX: u64 = 64 << 20;
const ROUNDS: usize = 3;

/// Largest resident memory since the process began, or since it was told to forget.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_pictures_take_no_memory() {
    let _alone = alone().await;
    let server = Server::with(Setup { vision: true, ..Setup::default() });
    // 14,143 squared is 200 million. 7,071 squared is within the limit of one picture, and four of those are
    // 200 million, but these files hold nothing of it.
    let mut files = Vec::new();
    for side in [14_143u16, 7_071] {
        let wide = u32::from(side);
        files.push(("png", made::png(wide, wide, &[], &[0; 4000])));
        files.push(("jpeg", made::jpeg(side, side)));
        files.push(("gif", made::gif(side, side)));
        files.push(("webp", made::webp(wide, wide)));
    }
    let before = resident();
    // "Forget the largest": other tests of this process had theirs.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    for _ in 0..ROUNDS {
        for (kind, bytes) in &files {
            let url = made::labelled(kind, bytes);
            let part = json!({"type": "image_url", "image_url": {"url": url}});
            let content = vec![part; 4];
            let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
            let answer = server.chat(body).await;
            let (status, code, _) = answer.error();
            assert_eq!(status, 400, "{kind}: {}", answer.text());
            assert!(["invalid_image", "image_too_large", "context_length_exceeded"].contains(&code.as_str()));
        }
    }
    let grown = peak().saturating_sub(before);
    assert!(grown < GROWTH_MAX, "{grown} bytes more");
}
