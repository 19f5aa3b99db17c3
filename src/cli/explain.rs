//! `mps-exporter explain`: what an Xid means for MPS clients, or an alert, and what to do.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use serde::Serialize;

use super::runbook;
use super::text::{print, width, wrap_into};
use crate::xid::{Action, Catalogue, Cause, Entry, Scope, is_never_primary, is_pid_of_bystander};

/// Width of the column of headings.
const HEADING: usize = 14;

/// Explains NVIDIA Xid codes (what each means for MPS clients, who dies, what to do) and alerts (their runbook).
#[derive(Debug, Args)]
pub struct Explain {
    /// Xid codes, such as `31` or `Xid 79`, or names of alerts, such as `MpsMassClientLoss`.
    #[arg(required = true, value_name = "XID|ALERT")]
    topics: Vec<String>,
    /// Prints JSON: a list with one object for each code or alert.
    #[arg(long)]
    json: bool,
    /// A CSV file of your own over the built-in catalogue, as `incidents.xid_catalog` in the configuration.
    #[arg(long, value_name = "FILE")]
    xid_catalog: Option<PathBuf>,
}

impl Explain {
    /// Prints the explanations to standard output.
    pub fn run(&self) -> anyhow::Result<()> {
        let site = self.xid_catalog.as_deref().map(Catalogue::with_overrides).transpose()?;
        let catalogue = site.as_ref().unwrap_or(Catalogue::builtin());
        let (pages, codes) = topics(&self.topics)?;
        let text = if self.json {
            json(&pages, &codes, catalogue)?
        } else {
            let mut parts: Vec<String> =
                pages.iter().map(|(_, page)| runbook::plain(page, width())).collect();
            if !codes.is_empty() {
                parts.push(plain(&codes, catalogue, width()));
            }
            parts.join("\n")
        };
        print(&text)
    }
}

/// The name of an alert, and its runbook in Markdown.
type Page = (&'static str, &'static str);

/// What a person asked for: runbooks and codes, each in their order.
fn topics(topics: &[String]) -> anyhow::Result<(Vec<Page>, Vec<u32>)> {
    let (alerts, others): (Vec<&String>, Vec<&String>) = topics
        .iter()
        .partition(|topic| topic.trim_start().get(..3).is_some_and(|it| it.eq_ignore_ascii_case("mps")));
    let mut pages = Vec::new();
    for alert in alerts {
        let Some(page) = runbook::page(alert.trim()) else {
            bail!(
                "{alert:?} is no alert of this exporter; there are {}",
                runbook::names().collect::<Vec<_>>().join(", ")
            );
        };
        pages.push(page);
    }
    let others: Vec<String> = others.into_iter().cloned().collect();
    let codes = if others.is_empty() && !pages.is_empty() { Vec::new() } else { codes(&others)? };
    Ok((pages, codes))
}

/// The codes that a person asked for, in their order: `31`, `xid31`, `Xid 31`, `13,31`.
fn codes(topics: &[String]) -> anyhow::Result<Vec<u32>> {
    let mut codes = Vec::new();
    for word in topics.iter().flat_map(|topic| topic.split([',', ' '])).filter(|word| !word.is_empty()) {
        let lower = word.to_ascii_lowercase();
        let digits = lower.strip_prefix("xid").unwrap_or(&lower);
        if digits.is_empty() {
            continue;
        }
        let Ok(code) = digits.parse::<u32>() else {
            bail!(
                "{word:?} is neither an Xid code nor an alert: expected one like `31` or `MpsMassClientLoss`"
            );
        };
        if !codes.contains(&code) {
            codes.push(code);
        }
    }
    if codes.is_empty() {
        bail!("expected an Xid code, as in `mps-exporter explain 31`");
    }
    Ok(codes)
}

/// One code in JSON.
#[derive(Serialize)]
struct Explanation<'c> {
    xid: u32,
    is_known: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    entry: Option<&'c Entry>,
    who_dies: &'static str,
    what_to_do: Vec<&'static str>,
    is_never_primary: bool,
    is_pid_of_bystander: bool,
}

/// An alert in JSON.
#[derive(Serialize)]
struct Alert {
    alert: &'static str,
    /// Markdown.
    runbook: &'static str,
}

fn json(pages: &[Page], codes: &[u32], catalogue: &Catalogue) -> anyhow::Result<String> {
    let alerts = pages.iter().map(|&(alert, runbook)| serde_json::to_value(Alert { alert, runbook }));
    let codes = codes
        .iter()
        .map(|&xid| {
            let entry = catalogue.get(xid);
            Explanation {
                xid,
                is_known: entry.is_some(),
                entry,
                who_dies: entry.map_or(UNKNOWN_WHO_DIES, who_dies),
                what_to_do: entry.map_or(vec![UNKNOWN_ADVICE], |entry| advice(entry).collect()),
                is_never_primary: is_never_primary(xid),
                is_pid_of_bystander: is_pid_of_bystander(xid),
            }
        })
        .map(serde_json::to_value);
    let all: Vec<serde_json::Value> = alerts.chain(codes).collect::<Result<_, _>>()?;
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

fn plain(codes: &[u32], catalogue: &Catalogue, width: usize) -> String {
    let mut out = String::new();
    for (index, &code) in codes.iter().enumerate() {
        if index > 0 {
            out.push('\n');
        }
        match catalogue.get(code) {
            Some(entry) => explain(&mut out, entry, width),
            None => explain_unknown(&mut out, code, width),
        }
    }
    out
}

const UNKNOWN_WHO_DIES: &str =
    "Not known. Look at which clients left within seconds of it, and at Xids beside it.";
const UNKNOWN_ADVICE: &str = "Look the code up in NVIDIA's Xid catalogue for your driver version, and read the whole \
                              line in the kernel log.";

fn explain_unknown(out: &mut String, code: u32, width: usize) {
    let _infallible = writeln!(out, "Xid {code}");
    let meaning = "This catalogue does not have the code: it may be newer than this exporter, or not an Xid at all. \
                   It is counted all the same, but nothing is concluded from it.";
    row(out, "Meaning", meaning, width);
    row(out, "Who dies", UNKNOWN_WHO_DIES, width);
    row(out, "What to do", UNKNOWN_ADVICE, width);
    row(out, "", "Once you know what it means, add it to the file of `incidents.xid_catalog`.", width);
}

fn explain(out: &mut String, entry: &Entry, width: usize) {
    let name = if entry.mnemonic.is_empty() { String::new() } else { format!("  {}", entry.mnemonic) };
    let _infallible = writeln!(out, "Xid {}{name}", entry.code);
    row(out, "Meaning", &format!("{}.", entry.description.trim_end_matches('.')), width);
    row(out, "Severity", &format!("{}, where MPS shares the GPU", entry.severity.word()), width);
    row(out, "To blame", blame(entry), width);
    row(out, "Who dies", who_dies(entry), width);
    if let Some(text) = about_pid(entry) {
        row(out, "The pid", text, width);
    }
    if !entry.note.is_empty() {
        row(out, "Good to know", &entry.note, width);
    }
    let steps: Vec<&str> = advice(entry).collect();
    for (index, step) in steps.iter().enumerate() {
        let heading = if index == 0 { "What to do" } else { "" };
        let step = if steps.len() == 1 { (*step).to_owned() } else { format!("{}. {step}", index + 1) };
        row(out, heading, &step, width);
    }
}

fn row(out: &mut String, heading: &str, text: &str, width: usize) {
    let _infallible = write!(out, "  {heading:HEADING$}");
    wrap_into(out, text, HEADING + 2, width);
}

fn blame(entry: &Entry) -> &'static str {
    match entry.cause {
        Cause::Application => "mostly the program that used the GPU",
        Cause::Driver => "mostly the driver or the GPU's firmware",
        Cause::Hardware => "mostly the hardware",
    }
}

fn who_dies(entry: &Entry) -> &'static str {
    match (entry.fatal, entry.scope) {
        (true, Scope::Process) => "The process that the line names.",
        (true, Scope::Context) => "The client whose channel it was; other MPS clients should live on.",
        (true, Scope::MpsServer) => {
            "Every client of the MPS server on this GPU and on the GPUs that its clients couple to it, whoever made \
             the fault. Other servers and MIG instances live on. New clients are refused until all victims have exited."
        }
        (true, Scope::Gpu) => {
            "Every process on the GPU: the MPS server, all its clients, and all MIG instances."
        }
        (true, Scope::Node) => {
            "Processes that use the link, on this GPU and its peers; with a fatal link error, every process on the GPU."
        }
        (false, _) => "Nobody by this alone.",
    }
}

fn about_pid(entry: &Entry) -> Option<&'static str> {
    if is_pid_of_bystander(entry.code) {
        return Some("A pid in the line is whoever was in the driver at that moment. Do not blame it.");
    }
    if is_never_primary(entry.code) {
        return Some("It names a victim, or a process that was stopped. The cause is in a line before.");
    }
    (entry.scope == Scope::MpsServer).then_some(
        "With a channel in the line, the pid owns that channel: the culprit. Without one it is only whoever was in the \
         driver.",
    )
}

fn advice(entry: &Entry) -> impl Iterator<Item = &'static str> {
    let has_clients = entry.fatal && matches!(entry.scope, Scope::MpsServer);
    let first = has_clients.then_some(
        "End the processes that were hit and still hang (`mps_recovery_blocking_clients`): the server recovers when \
         all have exited.",
    );
    first.into_iter().chain(entry.actions.iter().map(|action| match action {
        Action::None => "Nothing.",
        Action::RestartApp => {
            "Mend the program (compute-sanitizer finds bad accesses) and restart it from its last checkpoint."
        }
        Action::UpdateDriver => "Update the driver; search its release notes for this Xid.",
        Action::ResetGpu => {
            "Drain the GPU, stop the MPS daemon, reset it (`nvidia-smi --gpu-reset -i INDEX`), start MPS again."
        }
        Action::RebootNode => "Drain and reboot the node.",
        Action::CheckHardware => "Check power, cables, seating and bridges.",
        Action::ContactSupport => "If it comes back, send nvidia-bug-report.log to the vendor: the board may be bad.",
        Action::FollowText => "Do what the line itself says.",
        Action::FollowOther => "Follow the Xid that came before or beside it.",
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn codes_are_taken_as_people_write_them() {
        assert_eq!(
            codes(&words(&["31", "xid", "79", "Xid13,43", "31", "Xid 94"])).unwrap(),
            [31, 79, 13, 43, 94]
        );
        assert_eq!(
            codes(&words(&["page fault"])).unwrap_err().to_string(),
            "\"page\" is neither an Xid code nor an alert: expected one like `31` or `MpsMassClientLoss`"
        );
        assert!(codes(&words(&["xid"])).is_err() && codes(&words(&["-1"])).is_err());
    }

    #[test]
    fn a_page_fault_is_explained() {
        assert_eq!(
            plain(&[31], Catalogue::builtin(), 80),
            "\
Xid 31  ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT
  Meaning       GPU page fault: an engine used an address that is not mapped or
                not allowed.
  Severity      critical, where MPS shares the GPU
  To blame      mostly the program that used the GPU
  Who dies      Every client of the MPS server on this GPU and on the GPUs that
                its clients couple to it, whoever made the fault. Other servers
                and MIG instances live on. New clients are refused until all
                victims have exited.
  The pid       With a channel in the line, the pid owns that channel: the
                culprit. Without one it is only whoever was in the driver.
  Good to know  One of the two classic culprits: an index out of bounds, use
                after free, a pointer of the host. The line names the channel
                and the process that owns it. Lines with UNRECOGNIZED_CLIENT or
                REGION_VIOLATION can point at the driver or the hardware instead
                and have come before Xid 154.
  What to do    1. End the processes that were hit and still hang
                (`mps_recovery_blocking_clients`): the server recovers when all
                have exited.
                2. Mend the program (compute-sanitizer finds bad accesses) and
                restart it from its last checkpoint.
"
        );
    }

    #[test]
    fn every_code_and_unknown_ones_are_explained_within_the_width() {
        let codes: Vec<u32> = (0..=200).collect();
        let text = plain(&codes, Catalogue::builtin(), 60);
        for line in text.lines() {
            let is_one_word = line.split_whitespace().count() == 1;
            assert!(line.chars().count() <= 60 || is_one_word || line.starts_with("Xid "), "{line}");
        }
        assert!(text.contains("Xid 200\n  Meaning       This catalogue does not have the code"));
        assert!(plain(&[119], Catalogue::builtin(), 80).contains("Do not blame it."));
        assert!(plain(&[45], Catalogue::builtin(), 80).contains("names a victim"));
    }

    #[test]
    fn alerts_are_told_from_codes() {
        let (pages, codes) = topics(&words(&["MpsMassClientLoss", "31"])).unwrap();
        assert_eq!((pages.len(), codes), (1, vec![31]));
        assert!(topics(&words(&["MpsGpuLost"])).unwrap().1.is_empty());
        let unknown = topics(&words(&["MpsNothing"])).unwrap_err().to_string();
        assert!(unknown.contains("is no alert of this exporter; there are Mps"), "{unknown}");
    }

    #[test]
    fn json_has_the_same_facts() {
        let all: serde_json::Value = serde_json::from_str(
            &json(&[runbook::page("mpsgpulost").unwrap()], &[79, 999], Catalogue::builtin()).unwrap(),
        )
        .unwrap();
        assert_eq!(all[0]["alert"], "MpsGpuLost");
        assert!(all[0]["runbook"].as_str().unwrap().starts_with("# MpsGpuLost"));
        assert_eq!(all[1]["xid"], 79);
        assert_eq!(all[1]["entry"]["scope"], "gpu");
        assert_eq!(all[1]["entry"]["actions"][0], "reboot-node");
        assert_eq!(all[1]["is_pid_of_bystander"], true);
        assert_eq!(all[2]["is_known"], false);
        assert!(all[2].get("entry").is_none());
    }
}
