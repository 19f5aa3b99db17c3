//! GPUs and their Xids.

use crate::engine::snapshot::{GpuView, Snapshot, XidView};
use crate::event::{ComputeMode, RecoveryAction};
use crate::metrics::families;
use crate::metrics::labels::LabelValue;
use crate::metrics::series::{Page, Series, flag, last, total};

pub(super) fn gpus(page: &mut Page, snapshot: &Snapshot) {
    let gpus = &snapshot.gpus[..];
    page.family(&families::GPU_UP, |series| {
        for gpu in gpus {
            if let Some(is_up) = gpu.is_up {
                series.value(&[&gpu.index.to_string(), &gpu.uuid], flag(is_up));
            }
        }
    });
    page.family(&families::GPU_COMPUTE_MODE, |series| {
        states::<ComputeMode>(series, gpus, |gpu| gpu.compute_mode);
    });
    page.family(&families::GPU_RECOVERY_ACTION, |series| {
        states::<RecoveryAction>(series, gpus, |gpu| gpu.recovery_action);
    });
    page.family(&families::GPU_XID_ERRORS, |series| {
        for xid in &snapshot.xids {
            with_xid_labels(xid, |labels| series.value(labels, total(&xid.count)));
        }
    });
    page.family(&families::GPU_XID_LAST, |series| {
        for xid in &snapshot.xids {
            if let Some(at) = last(&xid.count) {
                with_xid_labels(xid, |labels| series.value(labels, at));
            }
        }
    });
}

fn states<T: LabelValue>(series: &mut Series, gpus: &[GpuView], of: impl Fn(&GpuView) -> Option<T>) {
    for gpu in gpus {
        if let Some(holds) = of(gpu) {
            series.states(&[&gpu.index.to_string(), &gpu.uuid], T::ALL, holds);
        }
    }
}

fn with_xid_labels(xid: &XidView, add: impl FnOnce(&[&str])) {
    let code = xid.code.map_or_else(|| "other".to_owned(), |code| code.to_string());
    add(&[&xid.gpu, &xid.uuid, &xid.gpu_instance, &code, xid.source.label()]);
}
