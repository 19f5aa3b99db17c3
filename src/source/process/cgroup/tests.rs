use proptest::prelude::*;

use super::*;

const UID: &str = "0f9d3c1a-77e2-4b0e-9c55-1d2e3f405162";
const UID_: &str = "0f9d3c1a_77e2_4b0e_9c55_1d2e3f405162";
const ID: &str = "5e1f0a9b7c3d2e4f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7";
const OTHER: &str = "00ff0a9b7c3d2e4f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7";

fn at(content: &str) -> Option<Placement> {
    let content = content.replace("{UID}", UID).replace("{UID_}", UID_).replace("{ID}", ID);
    placement(content.replace("{OTHER}", OTHER).as_bytes(), true)
}

fn pod_of(container: Option<&str>) -> Placement {
    Placement::Pod { uid: UID.into(), container: container.map(Into::into) }
}

fn container_of(id: &str) -> Placement {
    Placement::Container { id: id.into() }
}

fn unit_of(unit: &str) -> Placement {
    Placement::Unit { unit: unit.into() }
}

fn slurm_of(job: &str, step: Option<&str>, uid: Option<&str>) -> Placement {
    Placement::Slurm { job: job.into(), step: step.map(Into::into), uid: uid.map(Into::into) }
}

#[test]
fn every_shape_of_a_pod_is_known() {
    let shapes = [
        // cgroup v2, systemd driver: containerd, CRI-O, Docker; the three classes of service.
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/cri-containerd-{ID}.scope",
        "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice/crio-{ID}.scope",
        "0::/kubepods.slice/kubepods-pod{UID_}.slice/docker-{ID}.scope",
        // A group made inside of the container's: CRI-O's own, systemd in a container, Docker in a pod.
        "0::/kubepods.slice/kubepods-pod{UID_}.slice/crio-{ID}.scope/container",
        "0::/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{ID}.scope/system.slice/a.service",
        "0::/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{ID}.scope/docker/{OTHER}",
        // cgroupfs driver, v2 and v1.
        "0::/kubepods/burstable/pod{UID}/{ID}",
        "0::/kubepods/besteffort/pod{UID}/crio-{ID}",
        "0::/kubepods/pod{UID}/{ID}",
        "11:memory:/kubepods/burstable/pod{UID}/{ID}\n1:name=systemd:/kubepods/burstable/pod{UID}/{ID}",
        // Kubelet with the systemd driver, containerd without.
        "0::/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{ID}",
        // A cluster of containers (kind), below Docker and below a prefix of the kubelet's own.
        "0::/docker/{OTHER}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UID_}.slice/cri-containerd-{ID}.scope",
        "0::/docker/{OTHER}/kubelet/kubepods/burstable/pod{UID}/{ID}",
        // Read from a container with a cgroup namespace of its own.
        "0::/../../kubepods-besteffort-pod{UID_}.slice/cri-containerd-{ID}.scope",
        "0::/../../pod{UID}/{ID}",
        // Hybrid: the v2 hierarchy only has the runtime's service.
        "9:name=systemd:/kubepods/pod{UID}/{ID}\n4:memory:/kubepods/pod{UID}/{ID}\n0::/system.slice/containerd.service",
        // The container is being removed.
        "0::/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{ID}.scope (deleted)",
    ];
    for shape in shapes {
        assert_eq!(at(shape), Some(pod_of(Some(ID))), "{shape}");
    }
}

#[test]
fn a_pod_without_a_container_is_a_pod_and_the_fuller_hierarchy_wins() {
    assert_eq!(at("0::/kubepods.slice/kubepods-pod{UID_}.slice"), Some(pod_of(None)));
    assert_eq!(at("5:pids:/kubepods/pod{UID}\n4:memory:/kubepods/pod{UID}/{ID}"), Some(pod_of(Some(ID))));
}

#[test]
fn a_static_pod_has_a_hash_for_a_uid() {
    let hash = "4f0b1c2d3e4f5a6b7c8d9e0f1a2b3c4d";
    let expected = Some(Placement::Pod { uid: hash.into(), container: Some(ID.into()) });
    assert_eq!(at(&format!("0::/kubepods/burstable/pod{hash}/{{ID}}")), expected);
    assert_eq!(
        at(&format!("0::/kubepods.slice/kubepods-burstable-pod{hash}.slice/crio-{{ID}}.scope")),
        expected
    );
}

#[test]
fn every_shape_of_a_container_is_known() {
    let shapes = [
        "0::/system.slice/docker-{ID}.scope",
        "0::/docker/{ID}",
        "8:pids:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/containerd.service",
        "0::/machine.slice/libpod-{ID}.scope",
        "0::/machine.slice/libpod-{ID}.scope/container",
        "0::/machine.slice/machine-libpod_pod_{OTHER}.slice/libpod-{ID}.scope",
        "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
        "0::/libpod_parent/libpod-{ID}",
        "0::/ecstasks.slice/ecstasks-0a1b2c.slice/docker-{ID}.scope",
        "3:memory:/ecs/0a1b2c/{ID}",
        "0::/../cri-containerd-{ID}.scope",
    ];
    for shape in shapes {
        assert_eq!(at(shape), Some(container_of(ID)), "{shape}");
    }
    assert_eq!(at("0::/lxc.payload.trainer/init.scope"), Some(container_of("trainer")));
    assert_eq!(at("4:memory:/lxc/trainer"), Some(container_of("trainer")));
    let apptainer = "0::/user.slice/user-1000.slice/user@1000.service/user.slice/apptainer-8123.scope";
    assert_eq!(at(apptainer), Some(container_of("apptainer-8123")));
    assert_eq!(at("0::/system.slice/singularity-77.scope"), Some(container_of("singularity-77")));
    assert_eq!(at("7:memory:/apptainer/8123\n1:name=systemd:/"), Some(container_of("apptainer-8123")));
}

#[test]
fn every_shape_of_a_slurm_job_is_known() {
    let v2 = "0::/system.slice/slurmstepd.scope/job_8812/step_0/user/task_3";
    assert_eq!(at(v2), Some(slurm_of("8812", Some("0"), None)));
    let named_node = "0::/system.slice/gpu07_slurmstepd.scope/job_8812/step_batch/user/task_0";
    assert_eq!(at(named_node), Some(slurm_of("8812", Some("batch"), None)));
    let v1 =
        "7:memory:/slurm/uid_1701/job_8812/step_extern/task_0\n1:name=systemd:/system.slice/slurmd.service";
    assert_eq!(at(v1), Some(slurm_of("8812", Some("extern"), Some("1701"))));
    assert_eq!(at("7:cpuset:/slurm_gpu07/uid_1701/job_8812"), Some(slurm_of("8812", None, Some("1701"))));
    assert_eq!(at("0::/../job_8812/step_1/user"), Some(slurm_of("8812", Some("1"), None)));
    let container_in_job = "0::/system.slice/slurmstepd.scope/job_8812/step_0/user/libpod-{ID}.scope";
    assert_eq!(at(container_in_job), Some(slurm_of("8812", Some("0"), None)));
    let node_in_pod = "0::/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{ID}.scope/system.slice/slurmstepd.scope/job_5/step_0";
    assert_eq!(at(node_in_pod), Some(slurm_of("5", Some("0"), None)));
}

#[test]
fn slurm_is_left_alone_where_the_site_says_so() {
    let found = placement(b"0::/system.slice/slurmstepd.scope/job_8812/step_0", false);
    assert_eq!(found, Some(unit_of("slurmstepd.scope")));
}

#[test]
fn units_and_sessions_are_named_as_systemd_does() {
    assert_eq!(at("0::/system.slice/train.service"), Some(unit_of("train.service")));
    assert_eq!(
        at("0::/system.slice/system-job.slice/job@7\\x2da.service/worker"),
        Some(unit_of("job@7\\x2da.service"))
    );
    assert_eq!(at("0::/user.slice/user-1000.slice/session-4.scope"), Some(unit_of("session-4.scope")));
    assert_eq!(
        at("0::/user.slice/user-1000.slice/user@1000.service/app.slice/train.service"),
        Some(unit_of("user@1000.service/train.service"))
    );
    assert_eq!(
        at("0::/user.slice/user-1000.slice/user@1000.service/tasks"),
        Some(unit_of("user@1000.service"))
    );
    assert_eq!(at("4:memory:/a\n1:name=systemd:/system.slice/x.service"), Some(unit_of("x.service")));
}

#[test]
fn an_unknown_group_is_its_path_and_the_root_is_nothing() {
    assert_eq!(at("0::/jobs/alpha"), Some(Placement::Path { path: "/jobs/alpha".into() }));
    assert_eq!(at("4:memory:/m\n1:name=systemd:/\n0::/"), Some(Placement::Path { path: "/m".into() }));
    assert_eq!(at("4:memory:/\n0::/\n"), None);
    assert_eq!(at("0::/user.slice"), Some(Placement::Path { path: "/user.slice".into() }));
    assert_eq!(at(""), None);
}

#[test]
fn likenesses_are_not_taken_for_the_thing() {
    for shape in [
        "0::/jobs/job_12",
        "0::/kubepods/podfoo/x",
        "0::/tripod0f9d3c1a-77e2-4b0e-9c55-1d2e3f405162",
        "0::/0123456789abcdef0123456789abcdef",
    ] {
        assert!(matches!(at(shape), Some(Placement::Path { .. })), "{shape}: {:?}", at(shape));
    }
    let monitor = "0::/machine.slice/libpod-conmon-{ID}.scope";
    assert!(matches!(at(monitor), Some(Placement::Unit { .. })));
}

proptest! {
    #[test]
    fn no_content_makes_it_panic(content in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = placement(&content, true);
    }

    #[test]
    fn no_arrangement_of_known_parts_makes_it_panic_or_give_a_crooked_uid(
        parts in proptest::collection::vec(prop_oneof![
            Just(format!("kubepods-pod{UID_}.slice")), Just(format!("pod{UID}")), Just(ID.to_owned()),
            Just(format!("crio-{ID}.scope")), Just("job_1".to_owned()), Just("step_0".to_owned()),
            Just("..".to_owned()), Just("user@1.service".to_owned()), Just(format!("x:y:{ID}")), "[ -~&&[^/]]{0,12}",
        ], 0..8)
    ) {
        if let Some(Placement::Pod { uid, .. }) = placement(format!("0::/{}", parts.join("/")).as_bytes(), true) {
            prop_assert_eq!(uid, UID);
        }
    }
}
