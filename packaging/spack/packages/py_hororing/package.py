"""From a checkout: spack repo add packaging/spack; spack dev-build py-hororing@0.1.0.

The sources have no address yet that Spack could fetch them from.
"""

from spack.package import depends_on, license, requires, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHororing(PythonPackage):
    """Data-parallel training on many processes with five more lines; replaces Horovod."""

    license("Apache-2.0")

    version("0.1.0")

    variant("mpi", default=True, description="build the layer for an MPI; hororun needs none")

    requires("platform=linux")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.20:", type="build")
    depends_on("gmake", type="build")
    depends_on("py-setuptools@77:", type="build")
    depends_on("python@3.10:", type=("build", "link", "run"))
    depends_on("py-cffi@1.15:", type=("build", "run"))
    depends_on("py-numpy", type="run")
    depends_on("py-cloudpickle", type="run")
    depends_on("mpi", when="+mpi", type=("build", "run"))

    import_modules = ("hororing", "hororing.numpy", "hororing.hororun")

    def setup_build_environment(self, env):
        """Name the MPI: there may be others in PATH."""
        env.set("MPICC", self.spec["mpi"].mpicc if self.spec.satisfies("+mpi") else "OFF")
