"""`slime submit`: send a run to a cluster as a job that ends with a commit and goes on from it.

    `command`     what the user typed -> settings, checked -> the scheduler
    `folder`      settings -> the job's folder: run.yaml, job.json, the files that the settings name
    `job`         the program of every job, on the cluster: the folder -> the run, resumed if it began before
    `slurm`       the job's folder -> a batch script, submitted and followed
    `allocation`  the program of every node of a Slurm job
    `manifests`   the job's folder -> YAML for Kubernetes (a Job, KubeRay's RayJob) and SkyPilot

A job for a running Ray cluster is sent by `slime_launcher_ray.submit`, which alone imports Ray.
"""
