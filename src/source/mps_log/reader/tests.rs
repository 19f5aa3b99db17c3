use proptest::prelude::*;

use super::*;
use LogMessage as L;

const SERVER: &str = "[2026-04-23 06:04:59.367 Server  4428] ";
const OTHER_SERVER: &str = "[2026-04-23 06:04:59.367 Server  4429] ";
const CONTROL: &str = "[2026-04-23 06:04:59.367 Control  4411] ";

/// What `text` says, read in pieces that end where `cuts` say.
fn read(file: LogFile, text: &[u8], cuts: &[usize]) -> (Vec<(u32, L)>, Counts) {
    let mut reader = LineReader::new(file);
    let mut said = Vec::new();
    let (mut done, mut end) = (0, 0);
    for cut in cuts.iter().copied().chain([text.len()]) {
        end = cut.min(text.len()).max(end);
        done += reader.read(&text[done..end], |_, each| said.push((each.writer, each.message)));
    }
    (said, reader.take_counts())
}

fn messages(file: LogFile, lines: &[String]) -> (Vec<L>, Counts) {
    let (said, counts) = read(file, format!("{}\n", lines.join("\n")).as_bytes(), &[]);
    (said.into_iter().map(|(_, message)| message).collect(), counts)
}

#[test]
fn numbers_belong_to_the_heading_of_their_writer() {
    let (said, counts) = messages(
        LogFile::Server,
        &[
            format!("{SERVER}The following devices will be reset:"),
            format!("{OTHER_SERVER}The following clients have a sticky error set:"),
            format!("{SERVER}0"),
            format!("{OTHER_SERVER}71"),
            format!("{SERVER}1"),
            format!("{SERVER}The following clients have a sticky error set:"),
            format!("{SERVER}81"),
            format!("{OTHER_SERVER}72"),
            format!("{SERVER}Client {{81, 1}} exit"),
            format!("{SERVER}99"),
        ],
    );
    let expected = [
        L::FaultDevice { ordinal: 0 },
        L::StickyClient { pid: 71 },
        L::FaultDevice { ordinal: 1 },
        L::StickyClient { pid: 81 },
        L::StickyClient { pid: 72 },
        L::ClientLeft { pid: 81, context: Some(1) },
    ];
    assert_eq!(said, expected);
    assert_eq!(counts, Counts { recognized: 9, unrecognized: 1 }, "99 has no heading any more");
}

#[test]
fn headings_are_bounded() {
    let mut reader = LineReader::new(LogFile::Server);
    for writer in 0..1000 {
        let line =
            format!("[2026-04-23 06:04:59.367 Server {writer:5}] The following devices will be reset:");
        assert_eq!(reader.line(line.as_bytes()), None);
    }
    assert_eq!(reader.context.blocks.len(), OPEN_BLOCKS_LIMIT);
    let newest = "[2026-04-23 06:04:59.367 Server   999] 3";
    assert_eq!(reader.line(newest.as_bytes()).unwrap().message, L::FaultDevice { ordinal: 3 });
}

#[test]
fn answers_to_commands_are_recognized_and_nothing_is_read_into_them() {
    let (said, counts) = messages(
        LogFile::Control,
        &[
            format!("{CONTROL}Accepting connection..."),
            format!("{CONTROL}NEW UI"),
            format!("{CONTROL}Cmd:get_server_list"),
            format!("{CONTROL}17"),
            format!("{CONTROL}Cmd:ps"),
            format!("{CONTROL}PID       ID        SERVER"),
            format!("{CONTROL}22 x {CONTROL}Server 17 exited with status 1"),
            format!("{CONTROL}Server 18 exited with status 0"),
            format!("{CONTROL}UI closed"),
            format!("{CONTROL}17"),
        ],
    );
    assert_eq!(
        said,
        [L::ServerExited { pid: 18, status: 0 }],
        "the daemon's own lines interleave with answers"
    );
    assert_eq!(counts, Counts { recognized: 9, unrecognized: 1 });
}

#[test]
fn a_record_that_a_crash_cut_hides_nothing() {
    for cut in 1..SERVER.len() + 20 {
        let whole = format!("{SERVER}Client {{PID: 4267, Context ID: 0}} connected");
        let line = format!("{}{CONTROL}Starting control daemon using socket /tmp/x", &whole[..cut]);
        let (said, _) = messages(LogFile::Merged, &[line]);
        assert_eq!(said, [L::DaemonStarted], "cut at {cut}");
    }
}

#[test]
fn odd_bytes() {
    let text = [
        format!("{SERVER}Exiting\r\n").into_bytes(),
        b"\0\0\0\0".to_vec(),
        format!("{SERVER}Exiting\n").into_bytes(),
        b"\xff\xfe\x00 no line of ours\n\n\r\n".to_vec(),
        format!("{SERVER}Server has st\0rted\n").into_bytes(),
        format!("{SERVER}Failed to start : \n").into_bytes(),
    ]
    .concat();
    let (said, counts) = read(LogFile::Server, &text, &[]);
    assert_eq!(
        said.into_iter().map(|(_, message)| message).collect::<Vec<_>>(),
        [L::ServerLeaving, L::ServerLeaving, L::ServerStartFailed("".into())]
    );
    assert_eq!(counts, Counts { recognized: 5, unrecognized: 2 });
}

#[test]
fn a_line_of_any_length_is_bounded() {
    for length in [LINE_LIMIT, LINE_LIMIT + 1, 5 * LINE_LIMIT, 300_000] {
        let line = format!("{SERVER}{}\n{SERVER}Exiting\n", "x".repeat(length - SERVER.len()));
        let mut reader = LineReader::new(LogFile::Server);
        let mut said = 0;
        let mut buffer = Vec::new();
        for piece in line.as_bytes().chunks(1000) {
            buffer.extend_from_slice(piece);
            let done = reader.read(&buffer, |_, _| said += 1);
            buffer.drain(..done);
            assert!(buffer.len() <= LINE_LIMIT + 1000, "{length}");
        }
        assert_eq!((said, reader.take_counts()), (1, Counts { recognized: 1, unrecognized: 1 }), "{length}");
    }
}

#[test]
fn container_records_are_joined() {
    let at = "2026-04-23T06:04:59.367188348Z";
    let lines = [
        format!("{at} stdout P {SERVER}Server has"),
        format!("{at} stderr F E1220 11:03:48.293764 99 main.go:213] something"),
        format!("{at} stdout P  star"),
        format!("{at} stdout F ted"),
        format!("{at} stdout F {CONTROL}NEW SERVER 12: Ready"),
        format!("{SERVER}Exiting"),
    ];
    let (said, counts) = messages(LogFile::Merged, &lines);
    assert_eq!(said, [L::ServerStarted, L::ServerReady { pid: 12 }, L::ServerLeaving]);
    assert_eq!(counts, Counts { recognized: 3, unrecognized: 1 });

    let mut endless = LineReader::new(LogFile::Merged);
    let part = format!("{at} stdout P {}\n", "x".repeat(8000));
    for _ in 0..100 {
        endless.read(part.as_bytes(), |_, _| {});
    }
    assert!(endless.context.partial.as_ref().unwrap().1.len() <= LINE_LIMIT + 1);
}

#[test]
fn evidence_keeps_its_words() {
    let mut reader = LineReader::new(LogFile::Server);
    let mut entry = |text: &str| {
        let line = format!("{SERVER}{text}");
        reader.line(line.as_bytes()).unwrap().into_entry(LogFile::Server)
    };
    assert_eq!(
        entry("Server is handling a fatal GPU error.").text.unwrap().as_ref(),
        "Server is handling a fatal GPU error."
    );
    assert_eq!(entry("Received new client request").text, None);
}

/// Lines of every kind, some of them damaged.
fn any_line() -> impl Strategy<Value = Vec<u8>> {
    let known = prop::sample::select(vec![
        format!("{SERVER}The following devices will be reset:"),
        format!("{SERVER}The following clients have a sticky error set:"),
        format!("{SERVER}12"),
        format!("{OTHER_SERVER}13"),
        format!("{SERVER}Client {{PID: 4267, Context ID: 0}} connected"),
        format!("{SERVER}Client process disconnected"),
        format!("{SERVER}Receive command failed, assuming client exit"),
        format!("{CONTROL}Accepting connection..."),
        format!("{CONTROL}Cmd:ps"),
        format!("{CONTROL}22805     7         4452"),
        format!("{CONTROL}Server 95 exited with status 1"),
        format!("2026-04-23T06:04:59.367188348Z stdout P {SERVER}Server has "),
        "2026-04-23T06:04:59.367188348Z stdout F started".to_owned(),
        "x".repeat(LINE_LIMIT + 1),
        format!("2026-04-23T06:04:59.367188348Z stdout P {}", "x".repeat(LINE_LIMIT)),
        String::new(),
    ]);
    prop_oneof![
        8 => known.clone().prop_map(String::into_bytes),
        1 => (known, any::<prop::sample::Index>()).prop_map(|(line, at)| {
            line.as_bytes()[..at.index(line.len() + 1)].to_vec()
        }),
        1 => prop::collection::vec(any::<u8>(), 0..60),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// However the bytes arrive, the same is read, and every line is counted once.
    #[test]
    fn pieces_do_not_matter(
        lines in prop::collection::vec(any_line(), 0..40),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let mut text = lines.join(&b'\n');
        text.push(b'\n');
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len())).collect();
        cuts.sort_unstable();
        let whole = read(LogFile::Server, &text, &[]);
        prop_assert_eq!(&read(LogFile::Server, &text, &cuts), &whole);
        let newlines = memchr::memchr_iter(b'\n', &text).count() as u64;
        prop_assert_eq!(whole.1.recognized + whole.1.unrecognized, newlines);
        prop_assert_eq!(read(LogFile::Merged, &text, &cuts), read(LogFile::Merged, &text, &[]));
    }

    /// A reader that stops after any line and goes on from its context reads the same.
    #[test]
    fn a_restart_between_lines_does_not_matter(lines in prop::collection::vec(any_line(), 0..40)) {
        let mut text = lines.join(&b'\n');
        text.push(b'\n');
        let (whole, _) = read(LogFile::Merged, &text, &[]);
        let mut said = Vec::new();
        let mut context = Context::default();
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            let kept = serde_json::to_vec(&context).unwrap();
            let mut reader = LineReader::resume(LogFile::Merged, serde_json::from_slice(&kept).unwrap());
            let done = reader.read(line, |_, each| said.push((each.writer, each.message)));
            prop_assert_eq!(done, line.len());
            context = reader.context().clone();
        }
        prop_assert_eq!(said, whole);
    }

    #[test]
    fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        read(LogFile::Merged, &bytes, &[]);
    }
}
