//! The exporter's own binary beside a bed.
#![allow(dead_code, reason = "no test uses all of it")]

use crate::mps::bed::Bed;
use crate::support::Program;

impl Program {
    /// Beside the bed, which it is told of by configuration; it discovers nothing else.
    pub fn start(bed: &Bed) -> Program {
        Program::beside(bed, "", None)
    }

    /// With more configuration, and as another user.
    pub fn beside(bed: &Bed, more: &str, uid: Option<u32>) -> Program {
        let directory = bed.directory().join(format!("exporter-{}", uid.unwrap_or(0)));
        let config = format!(
            "daemons: [{{name: bed, pipe_directory: {}, log_directory: {}}}]\n\
             discovery: {{enabled: false}}\nnvml: {{enabled: false}}\nkernel_log: {{enabled: false}}\n\
             state: {{directory: {}}}\n{more}\n",
            bed.pipe().display(),
            bed.log().display(),
            directory.display(),
        );
        Program::start_with(&directory, &config, uid)
    }
}
