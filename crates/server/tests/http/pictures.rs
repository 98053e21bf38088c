//! Pictures in every dialect: counted, cached by content, refused each in its own way (`docs/api.md` 3.3).

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::made;
use crate::support::{MODEL, Server, Setup};

fn seeing() -> Server {
    Server::with(Setup { vision: true, ..Setup::default() })
}

fn file(name: &str) -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo/eval/images");
    std::fs::read(Path::new(path).join(name)).unwrap()
}

fn url(bytes: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(bytes))
}

/// A PNG header that declares this size, and nothing behind it.
fn header(width: u32, height: u32) -> Vec<u8> {
    [made::header(width, height), made::png_chunk(b"IDAT", &[])].concat()
}

fn part(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn ask(parts: &[Value]) -> Value {
    let text = json!({"type": "text", "text": "What is this?"});
    let content: Vec<Value> = parts.iter().cloned().chain([text]).collect();
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pictures_are_counted_and_cached_by_content() {
    let server = seeing();
    let (one, other) = (url(&file("dev-248-0.png")), url(&file("dev-249-0.png")));
    let text = server.chat(json!({"max_tokens": 4})).await.ok();
    assert_eq!(text["usage"]["prompt_tokens_details"]["image_tokens"], 0);
    let dry = |parts: &[Value]| {
        let mut fields = ask(parts);
        fields["dry_run"] = true.into();
        fields
    };
    let counted = server.chat(dry(&[part(&one), part(&other)])).await.ok();
    let tokens: Vec<u64> =
        counted["image_tokens"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert!(tokens.len() == 2 && tokens.iter().all(|n| *n >= 4), "{counted}");
    let first = server.chat(ask(&[part(&one), part(&other)])).await.ok();
    let usage = &first["usage"];
    assert_eq!(usage["prompt_tokens_details"]["image_tokens"], tokens.iter().sum::<u64>());
    assert_eq!(usage["prompt_tokens"], counted["prompt_tokens"]);
    let again = server.chat(ask(&[part(&one), part(&other)])).await.ok();
    let cached = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    // Up to the end of the message: the prompt is too short for a state at its own end.
    assert!(cached(&again) > tokens.iter().sum::<u64>(), "{again}");
    assert_eq!(again["choices"], first["choices"]);
    // The same ids, other pictures.
    let swapped = server.chat(ask(&[part(&other), part(&one)])).await.ok();
    assert!(cached(&swapped) < tokens.iter().sum::<u64>(), "{swapped}");
    let counters = server.engine.status().counters;
    assert_eq!(counters.pictures_encoded, 2, "{counters:?}");
    let metrics = server.get("/metrics").await;
    assert!(metrics.text().contains(r#"clary_images_total{result="encoded"} 2"#), "{}", metrics.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn detail_low_has_fewer_tokens() {
    let server = seeing();
    let bytes = file("dev-248-0.png");
    let tokens = async |width: u32, detail: &str| {
        let mut fields = ask(&[json!({"type": "image_url",
            "image_url": {"url": url(&wide(&bytes, width)), "detail": detail}})]);
        fields["dry_run"] = true.into();
        server.chat(fields).await.ok()["image_tokens"][0].as_u64().unwrap()
    };
    assert_eq!((tokens(640, "high").await, tokens(640, "auto").await), (320, 320));
    assert!(tokens(640, "low").await <= 256);
}

/// A header of `width` x 512 in front of other bytes: enough to be measured.
fn wide(bytes: &[u8], width: u32) -> Vec<u8> {
    let head = header(width, 512);
    [&head[..33], &bytes[33..]].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_dialect_takes_pictures() {
    let server = seeing();
    let bytes = file("dev-250-0.png");
    let (link, data) = (url(&bytes), STANDARD.encode(&bytes));
    let plain = json!({"model": MODEL, "max_tokens": 3});
    let with = |more: Value| {
        let mut body = plain.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let image = json!({"type": "image", "source": source});
    let text = json!({"type": "text", "text": "What?"});
    let messages = with(json!({"messages": [{"role": "user", "content": [image, text]}]}));
    let reply = server.post("/v1/messages", &messages).await.ok();
    let whole = |usage: &Value| {
        usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap_or(0)
    };
    let counted = server.post("/v1/messages/count_tokens", &messages).await.ok();
    assert_eq!(counted["input_tokens"], whole(&reply["usage"]));
    let input = json!([{"type": "message", "role": "user",
        "content": [{"type": "input_image", "image_url": link}, {"type": "input_text", "text": "What?"}]}]);
    let body = json!({"model": MODEL, "max_output_tokens": 3, "input": input});
    let reply = server.post("/v1/responses", &body).await.ok();
    assert_eq!(reply["usage"]["input_tokens"], counted["input_tokens"]);
    let turn = json!({"role": "user", "content": "What?", "images": [data]});
    let body = json!({"model": MODEL, "stream": false, "options": {"num_predict": 3}, "messages": [turn]});
    let reply = server.post("/api/chat", &body).await.ok();
    assert_eq!(reply["prompt_eval_count"], counted["input_tokens"]);
    let body = json!({"model": MODEL, "stream": false, "options": {"num_predict": 3}, "prompt": "What?",
        "images": [link]});
    let reply = server.post("/api/generate", &body).await.ok();
    assert_eq!(reply["prompt_eval_count"], counted["input_tokens"]);
    // A picture in the result of a tool (T47).
    let call = json!({"id": "c", "type": "function", "function": {"name": "shoot", "arguments": "{}"}});
    let messages = json!([{"role": "user", "content": "Look."},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [part(&link)]}]);
    let reply = server.chat(json!({"messages": messages, "max_tokens": 3})).await.ok();
    assert!(reply["usage"]["prompt_tokens_details"]["image_tokens"].as_u64() > Some(0), "{reply}");
    assert_eq!(server.engine.status().counters.pictures_encoded, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_bad_picture_has_its_answer() {
    let server = seeing();
    let good = file("dev-248-0.png");
    let place = Some("messages[0].content[0]".to_owned());
    let data = |bytes: &[u8]| part(&url(bytes));
    for (bad, code) in [
        (part("data:image/png;base64,%%%"), "invalid_image"),
        (part("data:image/png,raw"), "invalid_image"),
        (part("file:///etc/passwd"), "invalid_image"),
        (part("HTTPS://example.com/a.png"), "unsupported_parameter"),
        (data(&header(i32::MAX as u32, i32::MAX as u32)), "image_too_large"),
        (data(&header(u32::MAX, 1)), "image_too_large"),
        (data(b"<svg/>"), "invalid_image"),
        (data(&good[..good.len() / 2]), "invalid_image"),
        (data(&header(401, 2)), "invalid_image"),
        (data(&header(0, 5)), "invalid_image"),
        (data(&header(20_000, 20_000)), "image_too_large"),
        (data(&header(10_000, 10_000)), "image_too_large"),
        (part("https://example.com/a.png"), "unsupported_parameter"),
        (json!({"type": "image_url", "image_url": {"url": url(&good), "detail": "best"}}), "invalid_value"),
    ] {
        let answer = server.chat(ask(&[bad])).await;
        assert_eq!(answer.error(), (400, code.to_owned(), place.clone()), "{}", answer.text());
    }
    let many: Vec<Value> = (0..33).map(|_| data(&good)).collect();
    let answer = server.chat(ask(&many)).await;
    assert_eq!(answer.error(), (400, "invalid_value".into(), Some("messages[0].content[32]".into())));
    // More tokens than the context has: said before anything is decoded.
    let several: Vec<Value> = (0..4).map(|_| data(&wide(&good, 640))).collect();
    let (status, code, _) = server.chat(ask(&several)).await.error();
    assert_eq!((status, code.as_str()), (400, "context_length_exceeded"));
    let blind = Server::new();
    let answer = blind.chat(ask(&[data(&good)])).await;
    assert_eq!(answer.error(), (400, "unsupported_parameter".into(), place));
}

/// A model without a tower is told that a tool gave a picture; the conversation goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_that_cannot_be_seen_are_told_of() {
    let blind = Server::new();
    let link = url(&file("dev-250-0.png"));
    let call = json!({"id": "c", "type": "function", "function": {"name": "shoot", "arguments": "{}"}});
    let text = json!({"type": "text", "text": "Shot: "});
    let mut messages = json!([{"role": "user", "content": "Look."},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text, part(&link)]}]);
    let note = json!({"code": "picture_omitted", "path": "messages[2].content[1]"});
    let clary = json!({"notes": true, "prompt": true});
    let dry = blind.chat(json!({"messages": messages, "dry_run": true, "clary": clary})).await.ok();
    let prompt = dry["prompt"].as_str().unwrap();
    assert!(prompt.contains(&format!("Shot: {}\n</tool_response>", text::OMITTED_IMAGE)), "{prompt}");
    assert_eq!((&dry["notes"], &dry["image_tokens"]), (&json!([note]), &json!([])));
    let reply = blind.chat(json!({"messages": messages, "max_tokens": 3, "clary": clary})).await.ok();
    assert_eq!(reply["clary"]["notes"], json!([note]));
    // What a person shows is refused.
    messages[0]["content"] = json!([part(&link)]);
    let answer = blind.chat(json!({"messages": messages})).await;
    let place = Some("messages[0].content[0]".to_owned());
    assert_eq!(answer.error(), (400, "unsupported_parameter".into(), place));
}

/// A dry run does not decode pictures, so it cannot know what the cache has of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_runs_do_not_guess_what_is_cached_of_pictures() {
    let server = seeing();
    let asked = ask(&[part(&url(&file("dev-250-0.png")))]);
    server.chat(asked.clone()).await.ok();
    let mut dry = asked;
    dry["dry_run"] = true.into();
    let dry = server.chat(dry).await.ok();
    assert!(dry["image_tokens"][0].as_u64() > Some(0), "{dry}");
    assert_eq!(dry["cached_tokens_if_now"], Value::Null);
}

/// What is odd but a picture is seen, whatever its label, frames, colours and notes say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_pictures_are_seen() {
    let server = seeing();
    let good = file("dev-248-0.png");
    let orientation = |of: u16| {
        [&b"MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01"[..], &of.to_be_bytes(), &[0; 6]].concat()
    };
    let lies = [&b"MM\0\x2a\xff\xff\xff\xf0"[..], &[0xff; 40]].concat();
    let profile = made::png_chunk(b"iCCP", &[&b"p\0\0"[..], &made::stored(&[7; 300])].concat());
    for (what, kind, bytes) in [
        ("a PNG that calls itself JPEG", "jpeg", good.clone()),
        ("a JPEG that calls itself SVG", "svg+xml", made::sample("colour.jpg")),
        ("an animated GIF", "gif", made::sample("animated.gif")),
        ("an animated WebP", "webp", made::sample("animated.webp")),
        ("CMYK without a profile", "jpeg", made::sample("cmyk.jpg")),
        ("a profile of nonsense", "png", made::png(1, 1, &profile, &[0, 1, 2, 3])),
        ("EXIF that says sideways", "jpeg", made::with_exif(&orientation(6))),
        ("an orientation that is none", "jpeg", made::with_exif(&orientation(4711))),
        ("EXIF that points outside", "jpeg", made::with_exif(&lies)),
        ("one pixel", "png", made::png(1, 1, &[], &[0, 1, 2, 3])),
        ("as long and thin as may be", "png", made::png(200, 1, &[], &[0; 601])),
        ("more pixels than its size says", "png", made::png(2, 2, &[], &vec![0; 4 << 20])),
    ] {
        let answer = server.chat(ask(&[part(&made::labelled(kind, &bytes))])).await;
        assert_eq!(answer.status, 200, "{what}: {}", answer.text());
        let usage = &answer.ok()["usage"];
        assert!(usage["prompt_tokens_details"]["image_tokens"].as_u64() > Some(0), "{what}: {usage}");
    }
}

/// Sizes that lie, in every format, and files that end early: each has its own answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sizes_that_lie_are_refused() {
    let server = seeing();
    let place = Some("messages[0].content[0]".to_owned());
    let endless = made::png_chunk(b"iCCP", &[&b"p\0\0"[..], &made::stored(&vec![0; 18 << 20])].concat());
    let half = |name: &str| made::sample(name)[..made::sample(name).len() / 2].to_vec();
    for (what, kind, bytes, code) in [
        ("a PNG of 65,535 columns", "png", header(65_535, 400), "image_too_large"),
        ("a JPEG of 65,535 columns", "jpeg", made::jpeg(65_535, 400), "image_too_large"),
        ("a JPEG of 65,535 rows", "jpeg", made::jpeg(400, 65_535), "image_too_large"),
        ("a GIF of 65,535 columns", "gif", made::gif(65_535, 65_535), "image_too_large"),
        ("a WebP of 65,535 columns", "webp", made::webp(65_535, 400), "image_too_large"),
        ("a JPEG of 200 megapixels", "jpeg", made::jpeg(14_143, 14_143), "image_too_large"),
        ("a JPEG of no rows", "jpeg", made::jpeg(40, 0), "invalid_image"),
        ("a GIF of no columns", "gif", made::gif(0, 40), "invalid_image"),
        (
            "a PNG with too little for its size",
            "png",
            made::png(7000, 7000, &[], &[0; 4000]),
            "invalid_image",
        ),
        ("a PNG of 201 to 1", "png", made::png(201, 1, &[], &[0; 604]), "invalid_image"),
        ("a JPEG that ends early", "jpeg", half("colour.jpg"), "invalid_image"),
        ("a WebP that ends early", "webp", half("lossy.webp"), "invalid_image"),
        ("a GIF that ends early", "gif", half("animated.gif"), "invalid_image"),
        ("a profile of 18 MiB", "png", made::png(1, 1, &endless, &[0, 1, 2, 3]), "invalid_image"),
        ("21 MiB", "png", [header(40, 40), vec![0; 21 << 20]].concat(), "image_too_large"),
    ] {
        let answer = server.chat(ask(&[part(&made::labelled(kind, &bytes))])).await;
        assert_eq!(answer.error(), (400, code.to_owned(), place.clone()), "{what}: {}", answer.text());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_possible_is_told() {
    for (server, sees) in [(seeing(), true), (Server::new(), false)] {
        let props = server.get("/props").await.ok();
        assert_eq!(props["modalities"]["vision"], sees);
        let models = server.get("/v1/models").await.ok();
        let capabilities = models["data"][0]["capabilities"].as_array().unwrap();
        assert_eq!(capabilities.contains(&"vision".into()), sees);
        let shown = server.post("/api/show", &json!({"model": MODEL})).await.ok();
        assert_eq!(shown["capabilities"].as_array().unwrap().contains(&"vision".into()), sees);
    }
}

/// A slot whose prompt waits for its pictures says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_that_encode_say_so() {
    let server =
        Server::with(Setup { vision: true, image: std::time::Duration::from_millis(3), ..Setup::default() });
    let reply = server.chat(ask(&[part(&url(&file("dev-248-0.png")))]));
    let look = async {
        server.until("a picture is encoded", |status| !status.encoding.is_empty()).await;
        let slots = server.get("/slots").await.ok();
        let states: Vec<&str> =
            slots.as_array().unwrap().iter().map(|slot| slot["state"].as_str().unwrap()).collect();
        assert_eq!(states.iter().filter(|state| **state == "image").count(), 1, "{slots}");
        let metrics = server.get("/metrics").await;
        assert!(metrics.text().contains(r#"clary_slots{state="image"} 1"#), "{}", metrics.text());
    };
    let (reply, ()) = tokio::join!(reply, look);
    reply.ok();
}
