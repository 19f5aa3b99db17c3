use proptest::prelude::*;

use super::*;

/// A daemon's answers: the first entry that matches a question is given.
fn answered(depth: Depth, answers: &[(&str, &str)]) -> Result<Look, AnswerError> {
    let (mut conversation, opening) = Conversation::new(depth);
    let mut pending: VecDeque<Question> = opening.into();
    while let Some(question) = pending.pop_front() {
        let text = question.to_string();
        let answer = answers.iter().find(|(asked, _)| *asked == text).map_or("", |(_, answer)| answer);
        for line in answer.lines() {
            pending.extend(conversation.line(line)?);
        }
        if question == Question::End {
            break;
        }
    }
    conversation.finish()
}

const LIST: (&str, &str) = ("get_server_list", "4452");
const PERCENTAGE: (&str, &str) = ("get_default_active_thread_percentage", "100.0");
const ACTIVE: (&str, &str) = ("get_server_status 4452", "ACTIVE");

#[test]
fn an_idle_daemon_has_no_servers() {
    let look = answered(Depth::Full, &[PERCENTAGE]).unwrap();
    assert_eq!(look.servers, []);
    assert_eq!(look.default_active_thread_percentage, Some(100.0));
}

#[test]
fn a_full_look_tells_state_clients_and_contexts() {
    let ps = "\
PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND
22805     7         4452           GPU-CB1213a3-d6a4-be7f    4026531836     /opt/job/train.py
22805     3         4452           MIG-cb1213a3-d6a4-be7f    4026531836     ray::IDLE worker";
    let look = answered(
        Depth::Full,
        &[LIST, PERCENTAGE, ACTIVE, ("get_client_list 4452", "22805\n22806"), ("ps -p 4452", ps)],
    )
    .unwrap();
    let server = &look.servers[0];
    assert_eq!(server.status, Some(ServerStatus::Active));
    assert_eq!(server.clients.as_deref(), Some([22805, 22806].as_slice()));
    let contexts = server.contexts.as_ref().unwrap();
    assert_eq!(
        contexts[0],
        ContextLook {
            pid: 22805,
            context: 7,
            device: DeviceName::UuidPrefix("GPU-cb1213a3-d6a4-be7f".into()),
            namespace: Some(4_026_531_836),
            command: Some("train.py".into()),
        }
    );
    assert_eq!(contexts[1].device, DeviceName::UuidPrefix("MIG-cb1213a3-d6a4-be7f".into()));
    assert_eq!(contexts[1].command.as_deref(), Some("ray::IDLE"));
}

#[test]
fn a_state_look_asks_for_no_clients() {
    let look = answered(Depth::State, &[LIST, PERCENTAGE, ("get_server_status 4452", "FAULT")]).unwrap();
    assert_eq!(look.servers[0].status, Some(ServerStatus::Fault));
    assert_eq!(look.servers[0].clients, None);
    assert_eq!(look.servers[0].contexts, None);
}

#[test]
fn a_driver_without_get_server_status_leaves_the_state_unknown() {
    let look = answered(
        Depth::Full,
        &[LIST, PERCENTAGE, ("get_server_status 4452", "Unknown command \"get_server_status\"")],
    )
    .unwrap();
    assert_eq!(look.servers[0].status, None);
    assert_eq!(look.servers[0].clients.as_deref(), Some([].as_slice()));
    assert_eq!(look.servers[0].contexts.as_deref(), Some([].as_slice()));
}

#[test]
fn clients_without_contexts_leave_the_contexts_untold() {
    let look = answered(Depth::Full, &[LIST, PERCENTAGE, ACTIVE, ("get_client_list 4452", "7")]).unwrap();
    assert_eq!(look.servers[0].clients.as_deref(), Some([7].as_slice()));
    assert_eq!(look.servers[0].contexts, None);
}

#[test]
fn two_servers_keep_their_own_answers() {
    let rows = |server: &str, pid: &str| {
        format!(
            "PID ID SERVER STATUS DEVICE NAMESPACE COMMAND\n{pid} 1 {server} ACTIVE GPU-aa-bb-cc-dd-ee 7 ./app"
        )
    };
    let (first, second) = (rows("10", "100"), rows("20", "200"));
    let look = answered(
        Depth::Full,
        &[
            ("get_server_list", "10\n20\n"),
            PERCENTAGE,
            ("get_server_status 10", "ACTIVE"),
            ("get_client_list 10", "100"),
            ("ps -p 10", &first),
            ("get_server_status 20", "INITIALIZING"),
            ("get_client_list 20", "200"),
            ("ps -p 20", &second),
        ],
    )
    .unwrap();
    assert_eq!(look.servers.len(), 2);
    assert_eq!(look.servers[1].status, Some(ServerStatus::Initializing));
    for (server, pid) in look.servers.iter().zip([100, 200]) {
        assert_eq!(server.clients.as_deref(), Some([pid].as_slice()));
        let contexts = server.contexts.as_ref().unwrap();
        assert_eq!(contexts.len(), 1);
        assert_eq!(contexts[0].pid, pid);
        assert_eq!(contexts[0].device, DeviceName::Uuid("GPU-aa-bb-cc-dd-ee".into()));
    }
}

#[test]
fn a_server_that_left_before_its_state_was_asked_is_not_listed() {
    let gone = "Server 4452 not found";
    let look = answered(Depth::Full, &[LIST, PERCENTAGE, ("get_server_status 4452", gone)]).unwrap();
    assert_eq!(look.servers, []);
}

#[test]
fn a_server_that_leaves_during_the_session_has_unknown_clients() {
    let gone = "Server 4452 not found\nServer 4452 not found\n";
    let look = answered(
        Depth::Full,
        &[LIST, PERCENTAGE, ACTIVE, ("get_client_list 4452", "Server 4452 not found"), ("ps -p 4452", gone)],
    )
    .unwrap();
    assert_eq!(look.servers[0].clients, None);
    assert_eq!(look.servers[0].contexts, None);
}

#[test]
fn a_second_server_that_left_does_not_spoil_the_first() {
    let ps = "PID ID SERVER DEVICE NAMESPACE COMMAND\n100 1 10 GPU-aa-bb-cc 7 ./app";
    let look = answered(
        Depth::Full,
        &[
            ("get_server_list", "10\n20\n"),
            PERCENTAGE,
            ("get_server_status 10", "ACTIVE"),
            ("get_client_list 10", "100"),
            ("ps -p 10", ps),
            ("get_server_status 20", "Server 20 not found"),
        ],
    )
    .unwrap();
    assert_eq!(look.servers.len(), 1);
    assert_eq!(look.servers[0].contexts.as_ref().map(Vec::len), Some(1));
}

#[test]
fn a_refused_server_list_is_an_error_and_not_an_idle_daemon() {
    let refused = "Unknown command \"get_server_list\"";
    let error = answered(Depth::State, &[("get_server_list", refused), PERCENTAGE]).unwrap_err();
    assert!(error.to_string().contains("get_server_list"), "{error}");
    let error = answered(Depth::State, &[("get_server_list", "server,uid\n4452,0"), PERCENTAGE]).unwrap_err();
    assert!(matches!(error, AnswerError::Unexpected { .. }));
}

#[test]
fn a_session_cut_short_is_an_error() {
    let (mut conversation, _) = Conversation::new(Depth::Full);
    conversation.line("4452").unwrap();
    assert!(matches!(conversation.finish(), Err(AnswerError::Unanswered(_))));
}

#[test]
fn a_command_never_shows_arguments() {
    for (command, name) in [
        ("/opt/job/train.py", Some("train.py")),
        ("python", Some("python")),
        ("nginx: worker process", Some("nginx:")),
        ("train --password hunter2", Some("train")),
        ("/opt/my job/train.py", None),
        ("python /srv/secret.py", None),
        ("/", None),
        ("", None),
    ] {
        assert_eq!(program_name(command).as_deref(), name, "{command:?}");
    }
}

#[test]
fn memory_is_bounded() {
    let (mut conversation, _) = Conversation::new(Depth::Full);
    let error = (1..=1_000).find_map(|pid| conversation.line(&pid.to_string()).err());
    assert_eq!(error, Some(AnswerError::TooManyServers));
    let (mut conversation, _) = Conversation::new(Depth::Full);
    let error = (1..=20_000).find_map(|_| conversation.line("7").err());
    assert_eq!(error, Some(AnswerError::TooLong));
}

proptest! {
    #[test]
    fn no_answer_makes_it_panic(lines in prop::collection::vec(
        prop_oneof![
            "[0-9]{1,11}", Just("100.0".to_owned()), Just("ACTIVE".to_owned()), Just("\0".to_owned()),
            Just("PID ID DEVICE COMMAND".to_owned()), Just("Server 7 not found".to_owned()),
            "[0-9]{1,6} +[0-9]{1,3} +(GPU|MIG)-[0-9a-f]{1,4}(-[0-9a-f]{1,4}){0,5} .{0,20}", ".{0,40}",
        ],
        0..40,
    )) {
        let (mut conversation, _) = Conversation::new(Depth::Full);
        for line in &lines {
            if conversation.line(line).is_err() {
                return Ok(());
            }
        }
        let _partial = conversation.finish();
    }
}
