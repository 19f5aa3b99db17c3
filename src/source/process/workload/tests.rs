use std::os::unix::fs::symlink;

use super::*;
use crate::source::process::testing::FakeProc;

const UID: &str = "0f9d3c1a-77e2-4b0e-9c55-1d2e3f405162";
const ID: &str = "5e1f0a9b7c3d2e4f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7";

struct World {
    proc: FakeProc,
    logs: tempfile::TempDir,
    now: Instant,
}

impl World {
    fn new() -> World {
        World { proc: FakeProc::new(), logs: tempfile::tempdir().unwrap(), now: Instant::now() }
    }

    fn attributions(&self) -> Attributions {
        Attributions::new(Attributor {
            proc: self.proc.root(),
            pod_logs: self.logs.path().join("pods"),
            slurm: true,
            checkpoint_variable: Some("CKPT".into()),
        })
    }

    /// A process in this group, with this environment.
    fn process(&self, pid: u32, cgroup: &str, environment: &[&str]) -> Subject {
        self.proc.process(pid, "train", 50);
        self.proc.write(pid, "cgroup", &cgroup.replace("{UID}", UID).replace("{ID}", ID));
        self.proc.write(pid, "environ", &environment.join("\0"));
        Subject { process: ProcessId { pid, start: 50 }, uid: Some(1000), listed: None }
    }

    fn pod_folder(&self, container: &str) -> PathBuf {
        let folder = self.logs.path().join(format!("pods/vision_train-0_{UID}")).join(container);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn container_link(&self, container: &str, id: &str) {
        let folder = self.logs.path().join("containers");
        std::fs::create_dir_all(&folder).unwrap();
        let link = folder.join(format!("train-0_vision_{container}-{id}.log"));
        symlink(self.pod_folder(container).join("0.log"), link).unwrap();
    }

    fn mount(&self, pid: u32, uid: &str, container: &str) {
        let root = format!("/var/lib/kubelet/pods/{uid}/containers/{container}/8f3a");
        let mounts = format!(
            "900 800 0:90 / / rw - overlay overlay rw\n901 900 8:1 {root} /dev/termination-log rw - ext4 /dev/sda1 rw\n"
        );
        self.proc.write(pid, "mountinfo", &mounts);
    }
}

fn pod(names: Option<(&str, &str)>, container: Option<&str>) -> Workload {
    let (namespace, pod) = names.map(|(namespace, pod)| (namespace.into(), pod.into())).unzip();
    Workload::Pod { uid: UID.into(), namespace, pod, container: container.map(Into::into) }
}

fn slurm(job: &str, step: Option<&str>, user: &str) -> Workload {
    Workload::Slurm { job: job.into(), step: step.map(Into::into), user: Some(user.into()) }
}

#[test]
fn a_pod_gets_its_names_and_the_container_by_id() {
    let world = World::new();
    world.container_link("main", ID);
    world.container_link("setup", &"a".repeat(64));
    let subject =
        world.process(7, "0::/kubepods/burstable/pod{UID}/{ID}", &["SLURM_JOB_ID=5", "CKPT=/c/*.pt"]);
    let found = world.attributions().attribute(&subject, world.now).unwrap();
    assert_eq!(
        found.workload,
        Some(pod(Some(("vision", "train-0")), Some("main"))),
        "the pod goes before the job"
    );
    assert!(found.is_whole);
    assert_eq!(found.checkpoint.as_deref(), Some(OsStr::new("/c/*.pt")));
}

#[test]
fn without_the_id_only_a_single_container_or_the_mounts_tell_its_name() {
    let world = World::new();
    world.pod_folder("main");
    let subject = world.process(7, "0::/kubepods/pod{UID}/{ID}", &[]);
    let attribute = || world.attributions().attribute(&subject, world.now).unwrap();
    assert_eq!(attribute().workload, Some(pod(Some(("vision", "train-0")), Some("main"))));
    world.pod_folder("sidecar");
    let undecided = attribute();
    assert_eq!(undecided.workload, Some(pod(Some(("vision", "train-0")), None)), "a container was guessed");
    assert!(!undecided.is_whole);
    world.mount(7, UID, "sidecar");
    assert_eq!(attribute().workload, Some(pod(Some(("vision", "train-0")), Some("sidecar"))));
}

#[test]
fn an_unknown_pod_is_a_uid_and_says_that_the_logs_are_missing() {
    let world = World::new();
    let subject = world.process(7, "0::/kubepods/pod{UID}/{ID}", &[]);
    let mut attributions = world.attributions();
    assert_eq!(attributions.pod_logs(), None);
    let found = attributions.attribute(&subject, world.now).unwrap();
    assert_eq!((found.workload, found.is_whole), (Some(pod(None, None)), false));
    assert!(attributions.pod_logs().unwrap().is_err());
}

#[test]
fn the_kubelets_list_names_a_pod_whose_host_name_it_wrote() {
    let world = World::new();
    let mut subject = world.process(7, "0::/kubepods/pod{UID}/{ID}", &[]);
    world.proc.write(7, "root/etc/hostname", "train-0\n");
    world.mount(7, UID, "main");
    let pods = |containers: &[&str]| -> Option<Arc<[ListedPod]>> {
        let containers = containers.iter().map(|name| (*name).to_owned()).collect();
        Some([ListedPod { namespace: "vision".into(), name: "train-0".into(), containers }].into())
    };
    let mut attributions = world.attributions();
    let mut attribute = |subject: &Subject| attributions.attribute(subject, world.now).unwrap().workload;
    assert_eq!(attribute(&subject), Some(pod(None, Some("main"))));
    subject.listed = pods(&["other"]);
    assert_eq!(attribute(&subject), Some(pod(None, Some("main"))), "a pod without that container was taken");
    subject.listed = pods(&["main", "side"]);
    assert_eq!(attribute(&subject), Some(pod(Some(("vision", "train-0")), Some("main"))));
}

#[test]
fn a_group_hidden_by_a_cgroup_namespace_is_found_by_mounts_or_by_id() {
    let world = World::new();
    world.container_link("main", ID);
    let by_id = world.process(7, "0::/../cri-containerd-{ID}.scope", &[]);
    let by_mount = world.process(8, "0::/", &[]);
    world.mount(8, UID, "main");
    let nothing = world.process(9, "0::/", &[]);
    let mut attributions = world.attributions();
    let mut attribute = |subject| attributions.attribute(subject, world.now).unwrap().workload;
    let expected = Some(pod(Some(("vision", "train-0")), Some("main")));
    assert_eq!(attribute(&by_id), expected);
    assert_eq!(attribute(&by_mount), expected);
    assert_eq!(attribute(&nothing), None, "the root group of one process was taken for another's");
}

#[test]
fn mounts_that_contradict_each_other_name_nothing() {
    let world = World::new();
    let subject = world.process(7, "0::/kubepods/pod{UID}/{ID}", &[]);
    let line = |name| format!("9 8 8:1 /var/lib/kubelet/pods/{UID}/containers/{name}/1 /x rw - ext4 d rw\n");
    world.proc.write(7, "mountinfo", &(line("one") + &line("two")));
    assert_eq!(world.attributions().attribute(&subject, world.now).unwrap().workload, Some(pod(None, None)));
}

#[test]
fn slurm_is_found_by_group_and_else_by_environment() {
    let world = World::new();
    let mut attributions = world.attributions();
    let mut attribute = |pid, group: &str, environment: &[&str]| {
        attributions.attribute(&world.process(pid, group, environment), world.now).unwrap().workload
    };
    let group = "0::/system.slice/slurmstepd.scope/job_88/step_0/user/task_0";
    assert_eq!(
        attribute(7, group, &["SLURM_JOB_USER=ada", "SLURM_JOB_ID=1"]),
        Some(slurm("88", Some("0"), "ada"))
    );
    assert_eq!(attribute(8, group, &[]), Some(slurm("88", Some("0"), "1000")));
    let session = "0::/user.slice/user-1000.slice/session-3.scope";
    let batch = ["SLURM_JOB_ID=91", "SLURM_STEP_ID=4294967291"];
    assert_eq!(attribute(9, session, &batch), Some(slurm("91", Some("batch"), "1000")));
    assert_eq!(
        attribute(10, session, &["SLURM_JOB_ID=91;rm"]),
        Some(Workload::Unit { unit: "session-3.scope".into() })
    );
    assert_eq!(
        attribute(11, session, &["APPTAINER_NAME=torch.sif"]),
        Some(Workload::Container { id: "session-3.scope/torch.sif".into() })
    );
}

#[test]
fn answers_are_kept_and_partial_ones_for_a_shorter_time() {
    let world = World::new();
    let pod_subject = world.process(7, "0::/kubepods/pod{UID}/{ID}", &[]);
    let unit_subject = world.process(8, "0::/system.slice/a.service", &[]);
    let mut attributions = world.attributions();
    attributions.attribute(&pod_subject, world.now).unwrap();
    attributions.attribute(&unit_subject, world.now).unwrap();
    world.container_link("main", ID);
    world.process(8, "0::/system.slice/b.service", &[]);
    let mut after = |subject, seconds| {
        let now = world.now + Duration::from_secs(seconds);
        attributions.attribute(subject, now).unwrap().workload.unwrap().to_string()
    };
    assert_eq!(after(&pod_subject, 29), format!("pod {UID}"));
    assert_eq!(after(&pod_subject, 30), "pod vision/train-0 (main)");
    assert_eq!(after(&unit_subject, 599), "unit a.service");
    assert_eq!(after(&unit_subject, 600), "unit b.service");
}

#[test]
fn a_process_that_ended_and_a_pid_that_passed_on_are_gone() {
    let world = World::new();
    let subject = world.process(7, "0::/system.slice/a.service", &[]);
    let mut attributions = world.attributions();
    world.proc.process(7, "other", 60);
    assert!(attributions.attribute(&subject, world.now).unwrap_err().is_gone());
    world.proc.remove(7);
    assert!(attributions.attribute(&subject, world.now).unwrap_err().is_gone());
}

#[test]
fn real_groups_are_read_as_the_kernel_writes_them() {
    let Some(hierarchy) = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup", "/sys/fs/cgroup/memory"]
        .map(Path::new)
        .into_iter()
        .find(|path| path.join("cgroup.procs").exists())
    else {
        eprintln!("skipped: no cgroup hierarchy is mounted");
        return;
    };
    let top = hierarchy.join(format!("mps-exporter-test-{}.slice", std::process::id()));
    let slice = top.join(format!("kubepods-burstable-pod{}.slice", UID.replace('-', "_")));
    let scope = slice.join(format!("cri-containerd-{ID}.scope"));
    if std::fs::create_dir_all(&scope).is_err() {
        eprintln!("skipped: cgroups may not be made here");
        return;
    }
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let joined = std::fs::write(scope.join("cgroup.procs"), child.id().to_string());
    let world = World::new();
    let mut attributions =
        Attributions::new(Attributor { proc: ProcRoot::new("/proc"), ..world.attributions().with });
    let (process, _) = ProcRoot::new("/proc").process(child.id()).unwrap();
    let found = attributions.attribute(&Subject { process, uid: None, listed: None }, world.now);
    child.kill().unwrap();
    child.wait().unwrap();
    for folder in [&scope, &slice, &top] {
        // The kernel empties a group a little after its last process has ended.
        for _ in 0..100 {
            if std::fs::remove_dir(folder).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    if joined.is_err() {
        eprintln!("skipped: processes may not be moved to a cgroup here");
        return;
    }
    assert_eq!(found.unwrap().workload, Some(pod(None, None)));
}
