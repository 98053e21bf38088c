//! Conversations on the fake model: whatever the engine does, pieces join to the outcome.

// A call that fails fails its test.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use engine::fake::{FakeConfig, FakeModel};
use engine::{Engine, Handle, Settings};
use server::{
    Conversation, Finish, Options, Outcome, PictureFault, PictureProblem, ServeError, Session, StopReason,
    TextSide, Update,
};
use text::{Message, Piece, Reply, Role};

const WAIT: Duration = Duration::from_secs(30);

fn text_side() -> TextSide {
    TextSide::open(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"))).unwrap()
}

fn engine(text: &TextSide, poison: Option<u32>) -> Handle {
    let mut config = FakeConfig { poison, ..FakeConfig::default() };
    config.spec.vocabulary = text.tokenizer.vocab_size();
    let settings = Settings::new(text.tokenizer.vocab_size(), text.defaults.stop_ids.clone());
    Engine::start(Box::new(FakeModel::new(config)), settings).unwrap()
}

fn session() -> Session {
    let text = text_side();
    let engine = engine(&text, None);
    Session::new(text, engine)
}

fn ask(question: &str) -> Conversation {
    Conversation { messages: vec![Message::text(Role::User, question)], tools: Vec::new() }
}

fn options(max_tokens: usize) -> Options {
    Options { max_tokens: Some(max_tokens), ..Options::default() }
}

/// The outcome, whose reply must be the joined pieces.
fn outcome(session: &Session, conversation: Conversation, options: &Options) -> Outcome {
    let mut stream = session.start(conversation, options).unwrap();
    let mut joined = Reply::default();
    loop {
        match stream.next(WAIT) {
            Update::Piece(piece) => joined.absorb(piece),
            Update::Admitted(_) => {}
            Update::Idle => panic!("nothing came in {WAIT:?}"),
            Update::Finished(outcome) => {
                assert_eq!(outcome.reply, joined);
                assert_eq!(stream.next(Duration::ZERO), Update::Idle);
                return *outcome;
            }
        }
    }
}

#[test]
fn pieces_join_to_the_outcome() {
    let session = session();
    for thinking in [true, false] {
        let options = Options { thinking: Some(thinking), ..options(60) };
        let first = outcome(&session, ask("What is 37 + 58?"), &options);
        let (prompt, _) = session.text().render(ask("What is 37 + 58?"), &options, None).unwrap();
        assert_eq!(first.usage.prompt_tokens, prompt.ids.len());
        assert_eq!(first.usage.completion_tokens, first.ids.len());
        assert_eq!(first.finish, Finish::Length);
        assert_eq!(first.reply.reasoning.is_empty(), !thinking);
        assert_eq!(first.usage.reasoning_tokens > 0, thinking);
        let again = outcome(&session, ask("What is 37 + 58?"), &options);
        assert_eq!((again.ids, again.reply), (first.ids, first.reply));
    }
}

#[test]
fn a_stop_string_ends_the_reply_and_the_request() {
    let session = session();
    let plain = Options { thinking: Some(false), ..options(60) };
    let content = outcome(&session, ask("Hello"), &plain).reply.content;
    let stop: String = content.chars().skip(20).take(5).collect();
    let at = content.find(&stop).unwrap();
    let stopped = Options { stop: vec![stop.clone()], ..plain };
    let outcome = outcome(&session, ask("Hello"), &stopped);
    assert_eq!(outcome.reply.content, content[..at]);
    assert_eq!(outcome.finish, Finish::Stop);
    assert_eq!(outcome.stop_reason, Some(StopReason::Text(stop)));
    assert!(outcome.ids.len() < 60);
}

#[test]
fn a_cancelled_reply_keeps_what_came() {
    let session = session();
    let mut stream = session.start(ask("Hello"), &Options::default()).unwrap();
    let mut joined = Reply::default();
    let outcome = loop {
        match stream.next(WAIT) {
            Update::Piece(piece) => {
                joined.absorb(piece);
                stream.cancel();
            }
            Update::Admitted(_) => {}
            Update::Idle => panic!("nothing came in {WAIT:?}"),
            Update::Finished(outcome) => break *outcome,
        }
    };
    assert_eq!(outcome.reply, joined);
    assert!(matches!(outcome.finish, Finish::Cancelled | Finish::Length | Finish::Stop));
}

#[test]
fn a_numerical_fault_fails_the_reply() {
    let text = text_side();
    let poison = text.tokenizer.encode_text("Hello").unwrap()[0];
    let engine = engine(&text, Some(poison));
    let session = Session::new(text, engine);
    let failed = outcome(&session, ask("Hello"), &options(4));
    assert!(matches!(failed.finish, Finish::Failed(_)), "{:?}", failed.finish);
    assert!(failed.ids.is_empty());
}

#[test]
fn what_cannot_be_answered_is_refused() {
    let session = session();
    let refused = |conversation, options: &Options| session.start(conversation, options).err().unwrap();
    assert!(matches!(refused(Conversation::default(), &options(1)), ServeError::Request(_)));
    let long = ask(&"word ".repeat(2000));
    assert!(matches!(refused(long, &options(1)), ServeError::Refused(_)));
    let stops = Options { stop: vec![String::new()], ..options(1) };
    assert!(matches!(refused(ask("a"), &stops), ServeError::Request(_)));
    let picture = serde_json::json!([{"role": "user", "content":
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]);
    let picture = Conversation { messages: Message::parse_all(&picture).unwrap(), tools: Vec::new() };
    let ServeError::Picture(PictureFault { path, problem }) = refused(picture, &options(1)) else {
        panic!("pictures are refused")
    };
    assert_eq!(problem, PictureProblem::NoVision);
    assert_eq!(path, "messages[0].content[0]");
}

#[test]
fn notes_about_the_chat_come_first() {
    let session = session();
    let mut conversation = ask("Hello");
    conversation.messages.push(Message::text(Role::System, "Be brief."));
    let mut stream = session.start(conversation, &options(1)).unwrap();
    let Update::Piece(Piece::Note(note)) = stream.next(WAIT) else { panic!("a note comes first") };
    assert_eq!(note.code, "system_as_user");
}
